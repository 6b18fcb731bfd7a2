"""The question: what does truncated sampling cost, whose kept tokens travel with every token? Two minutes.

python -m scripts.bench.truncation [--repeats 3] [--only engine head training] [--steps 200] [--model FOLDER]

- engine: a vLLM engine on the CPU with random weights of 38,400 words answers 32 requests, which draw from all tokens,
  from those of top_p=0.9 top_k=20, and from those of top_p=0.9 alone, of which the flat model keeps nearly as many
  as may travel. The arm `top_p_top_k_untold` samples as an evaluation does, of which nothing travels. Tokens are
  counted per second of the CPU time of all processes, so that other work of the machine counts little.
- head: logprobs and entropies of 1,024 tokens, and the gradient, on one core, where each was drawn from so many.
- training: so many steps of REINFORCE with top_p=0.9 top_k=20, whose weights reach the engine after each. How far is
  the trainer from the engine, over what was left and over the whole vocabulary? The model of a folder, such as
  runs/latest/initial_model; an untrained one, if none is named.

The last line is JSON: tokens_per_cpu_s_<arm>, kept_<arm> (tokens), bytes_<arm> (per token, of what travels),
head_s_<number>, <left or whole>_<mean or max> (millionths of a nat between trainer and engine).
"""

import asyncio
import itertools
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from configs.rollout import MOST_KEPT
from configs.schema import Layout, Transport, WeightSyncConfig
from rollout.request_ids import RequestId
from rollout.types import (
    Completion,
    GenerationRequest,
    KeptTokens,
    Prompt,
    SamplingParams,
    TokenSequence,
    Trajectory,
    TrajectoryGroup,
)
from scripts.bench.common import cpu_seconds
from scripts.bench.harness import Figures, make_parser, progress, run_parts, show_figures, take_turns
from scripts.bench.models import SHAPES
from scripts.bench.updates import (
    Publisher,
    build_sender,
    engine_spec,
    model_weights,
    random_engine,
    started_engine,
)
from trainer.batch import assemble
from trainer.tiny.model import build_tokenizer, save_tiny_model
from trainer.tokens import sampled_tokens
from trainer.worker.model import Policy
from trainer.worker.token_logprobs import LogitRule, token_logprobs
from weight_sync.protocol import PublishOrder
from weight_sync.transports.cleanup import release_all

SHAPE = replace(SHAPES["small"], hidden=128, intermediate=256, layers=2, heads=2, kv_heads=1)
SAMPLED = {
    "all": SamplingParams(),
    "top_p_top_k": SamplingParams(top_p=0.9, top_k=20),
    "top_p": SamplingParams(top_p=0.9),
}
CPU = torch.device("cpu")
NUM_REQUESTS, LENGTH = 32, 100
HEAD_TOKENS, HEAD_KEPT = 1024, (0, 16, MOST_KEPT)
BATCH = 32
OWNER = f"bench-truncation-{os.getpid()}"
numbers = itertools.count()


def travelling(completions: list[Completion]) -> dict[str, float]:
    num_tokens = sum(completion.num_tokens for completion in completions)
    kept = [completion.kept for completion in completions if completion.kept is not None]
    num_bytes = sum(each.counts.nbytes + each.token_ids.nbytes for each in kept)
    return {"kept": sum(len(each.token_ids) for each in kept) / num_tokens, "bytes": num_bytes / num_tokens}


async def engine(repeats: int) -> Figures:
    async with random_engine(SHAPE, seq_tokens=1024, num_seqs=NUM_REQUESTS) as served:

        async def run(arm: tuple[SamplingParams, bool], _: int) -> Figures:
            sampling, travels = replace(arm[0], max_tokens=LENGTH, ignore_eos=True), arm[1]
            names = [RequestId(ordinal=next(numbers), is_evaluation=not travels) for _ in range(NUM_REQUESTS)]
            requests = [GenerationRequest(request_id=name, prompt_ids=(20, 30), sampling=sampling) for name in names]
            began = cpu_seconds()
            completions = await asyncio.gather(*map(served.generate, requests))
            rate = NUM_REQUESTS * LENGTH / (cpu_seconds() - began)
            return {"tokens_per_cpu_s": rate, **travelling(completions)}

        arms = {name: (sampling, True) for name, sampling in SAMPLED.items()}
        arms["top_p_top_k_untold"] = SAMPLED["top_p_top_k"], False
        await served.tag_loaded(0)
        runs = await take_turns(run, arms, repeats, warm_ups=1)
    runs.show("vLLM on the CPU", {"tokens_per_cpu_s": ".0f", "kept": ".1f", "bytes": ".0f"}, over="all")
    return {f"{figure}_{arm}": value for arm in arms for figure, value in runs.medians(arm).items()}


async def head(repeats: int) -> Figures:
    torch.set_num_threads(1)  # as a train worker on CPUs
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(HEAD_TOKENS, 256, generator=random, requires_grad=True)
    weight = torch.randn(SHAPE.vocab_size, 256, generator=random, requires_grad=True)
    targets = torch.randint(SHAPE.vocab_size, (HEAD_TOKENS,), generator=random)

    def run(num_kept: int, _: int) -> Figures:
        rows = (targets[:, None] + torch.arange(num_kept)) % SHAPE.vocab_size
        counts, token_ids = np.full(HEAD_TOKENS, num_kept, np.int32), rows.sort(1).values.flatten().int().numpy()
        kept = KeptTokens(counts=counts, token_ids=token_ids) if num_kept else None
        began = time.process_time()
        logprobs, entropy = token_logprobs(
            *(hidden, weight, None, targets),
            temperature=0.7,
            rule=LogitRule(),
            entropy_has_gradient=False,
            kept=kept,
        )
        (logprobs + entropy.detach()).sum().backward()
        return {"head_s": time.process_time() - began}

    runs = await take_turns(run, {str(num_kept): num_kept for num_kept in HEAD_KEPT}, repeats, warm_ups=1)
    runs.show("head of the trainer, by tokens that were left (0: all)", {"head_s": ".2f"}, over="0")
    return {f"head_s_{arm}": runs.median("head_s", arm) for arm in runs.by_arm}


async def training(steps: int, model: Path | None) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        path = model or Path(folder, "model")
        if model is None:
            save_tiny_model(path, build_tokenizer(["0123456789"]), seed=0)
        causal_lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        policy, adamw = Policy(causal_lm, 1.0), torch.optim.AdamW(causal_lm.parameters(), lr=1e-4)
        spec = replace(engine_spec(SHAPE, path, "cpu", seq_tokens=1024, num_seqs=BATCH), engine_args={})
        apart = dict[str, list[np.ndarray]](left=[], whole=[])
        publisher = Publisher(model_weights(causal_lm), build_sender(Transport.shared_memory, OWNER, "cpu"))
        try:
            async with started_engine(spec) as served:
                for step in range(steps):
                    await _update(served, publisher, step)
                    group = await _group(served)
                    tokens = sampled_tokens([group], step)
                    rewards = np.array([trajectory.reward for trajectory in group.trajectories], np.float32)
                    tokens = replace(tokens, advantages=(rewards - rewards.mean())[tokens.trajectories])
                    [[batch]] = assemble(
                        *([group], tokens),
                        layout=Layout.tree,
                        num_ranks=1,
                        tokens_per_micro_batch=2**30,
                        keep_idle=True,
                    ).micro_batches
                    logprobs, _ = policy(batch, CPU)
                    with torch.no_grad():
                        whole, _ = policy(replace(batch, tokens=replace(batch.tokens, kept=None)), CPU)
                    for name, found in {"left": logprobs.detach(), "whole": whole}.items():
                        apart[name].append(np.abs(found.numpy() - batch.tokens.rollout_logprobs))
                    adamw.zero_grad()
                    (-torch.as_tensor(batch.tokens.advantages) * logprobs).mean().backward()
                    adamw.step()
                    if step % 20 == 0:
                        progress(f"step {step}: {', '.join(f'{name} {apart[name][-1].max():.2g}' for name in apart)}")
        finally:
            release_all(WeightSyncConfig(), OWNER)
    joined = {name: np.concatenate(values) for name, values in apart.items()}
    figures = {f"{name}_mean": 1e6 * float(values.mean()) for name, values in joined.items()}
    figures |= {f"{name}_max": 1e6 * float(values.max()) for name, values in joined.items()}
    show_figures(f"trainer and engine over {steps} steps, {len(joined['left']):,} tokens, millionths of a nat", figures)
    return figures


async def _update(served: Any, publisher: Publisher, version: int) -> None:
    order = PublishOrder(global_steps=version, receivers={}, base=None, nonce=f"{version:08x}", timeout_s=60.0)
    manifest = await publisher.publish(order)
    await served.stage(manifest)
    await served.admission.hold()
    await served.freeze(clear_cache=False)
    await served.swap(version)
    await served.thaw()
    served.admission.release()


async def _group(served: Any) -> TrajectoryGroup:
    """Return answers to one prompt, rewarded by their share of even tokens."""
    sampling, prompt_ids = replace(SAMPLED["top_p_top_k"], max_tokens=32, ignore_eos=True), (20, 30, 40)
    requests = [
        GenerationRequest(request_id=RequestId(ordinal=next(numbers)), prompt_ids=prompt_ids, sampling=sampling)
        for _ in range(BATCH)
    ]
    trajectories = [
        Trajectory(
            sequences=(TokenSequence.of(prompt_ids, completion),),
            reward=float((completion.token_ids % 2 == 0).mean()),
            finish_reason=completion.finish_reason,
            text="",
            replica="",
        )
        for completion in await asyncio.gather(*map(served.generate, requests))
    ]
    prompt = Prompt(ordinal=0, text="", token_ids=prompt_ids, ground_truth="")
    return TrajectoryGroup(prompt=prompt, trajectories=tuple(trajectories))


def main() -> None:
    parser = make_parser(__doc__, repeats=3, parts=["engine", "head", "training"])
    parser.add_argument("--steps", type=int, default=200, help="steps of the training [200]")
    parser.add_argument("--model", type=Path, help="the folder of the model that is trained")
    options = parser.parse_args()
    parts = {
        "engine": lambda: engine(options.repeats),
        "head": lambda: head(options.repeats),
        "training": lambda: training(options.steps, options.model),
    }
    run_parts(options, parts)


if __name__ == "__main__":
    main()
