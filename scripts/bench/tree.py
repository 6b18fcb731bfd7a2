"""The question: what does trainer.layout=tree save over a row per sequence? Tokens and seconds of a step. Two minutes
on two cores.

python -m scripts.bench.tree [--repeats 5]

Groups of sessions on one CPU core, with random tokens and weights. The arms `tree` and `rows` train the same step. The
prompt is three quarters of every sequence, and shared by the group in `linear`, which has no branches, and `branches`,
where a second answer branches off in each turn. In `nothing`, every session has a prompt of its own. Tokens are those
computed, padding included; seconds those of layout, forward and backward; ratios tree over rows.
"""

import asyncio
import time
from dataclasses import dataclass

import numpy as np
import torch

from configs.algorithm import AlgorithmConfig
from configs.schema import Config, Layout
from rollout.types import IntArray, Prompt, TokenSequence, Trajectory, TrajectoryGroup, VersionSpan
from scripts.bench.harness import Figures, make_parser, take_turns
from scripts.observe.tables import write_json
from trainer.advantages.credit import assign_credit
from trainer.batch import assemble
from trainer.losses.objective import Objective
from trainer.tiny.model import VOCAB_SIZE, ModelSize, build_model
from trainer.tokens import sampled_tokens
from trainer.worker.model import Policy

WORKLOADS = ("linear", "branches", "nothing")
SHARED = 3
"""The tokens of a prompt over those of all turns."""
TOKENS_PER_MICRO_BATCH = 8192
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sessions of a group and the model that learns from them."""

    turns: int = 8
    group_size: int = 8
    turn_tokens: int = 16
    """The tokens of a turn, half of them sampled."""
    width: int = 256
    layers: int = 3


def make_group(shape: Shape, workload: str) -> TrajectoryGroup:
    """Return a group of sessions, half of them rewarded."""
    random = np.random.default_rng(0)
    length = SHARED * shape.turns * shape.turn_tokens
    prompts = random.integers(4, VOCAB_SIZE, (shape.group_size, length)).astype(np.int32)
    if workload != "nothing":
        prompts[:] = prompts[0]
    trajectories = tuple(
        Trajectory(
            sequences=_session(random, shape, prompt_ids, has_branches=workload == "branches"),
            reward=float(index % 2),
            finish_reason="stop",
            text="",
            replica="",
        )
        for index, prompt_ids in enumerate(prompts)
    )
    prompt = Prompt(ordinal=0, text="", token_ids=tuple(prompts[0].tolist()), ground_truth="")
    return TrajectoryGroup(prompt=prompt, trajectories=trajectories)


def _session(
    random: np.random.Generator, shape: Shape, prompt_ids: IntArray, *, has_branches: bool
) -> tuple[TokenSequence, ...]:
    answer = shape.turn_tokens // 2
    response_ids = random.integers(4, VOCAB_SIZE, shape.turns * shape.turn_tokens).astype(np.int32)
    loss_mask = np.arange(len(response_ids)) % shape.turn_tokens < answer
    sequences = [make_sequence(prompt_ids, response_ids, loss_mask)]
    for start in range(0, len(response_ids) if has_branches else 0, shape.turn_tokens):
        begun = np.concatenate([prompt_ids, response_ids[:start]])
        other_ids = random.integers(4, VOCAB_SIZE, answer).astype(np.int32)
        sequences.append(make_sequence(begun, other_ids, np.ones(answer, np.bool_)))
    return tuple(sequences)


def make_sequence(prompt_ids: IntArray, response_ids: IntArray, loss_mask: np.ndarray) -> TokenSequence:
    """Return a sequence that a policy has sampled which finds all tokens equally likely."""
    return TokenSequence(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        loss_mask=loss_mask,
        rollout_logprobs=np.where(loss_mask, -np.log(VOCAB_SIZE), 0).astype(np.float32),
        spans=(VersionSpan(0, len(response_ids), 0),),
    )


def train_step(policy: Policy, group: TrajectoryGroup, layout: Layout) -> Figures:
    """Compute forward and backward of one step, whose gradient is thrown away."""
    algorithm = AlgorithmConfig()
    tokens = assign_credit([group], sampled_tokens([group], 0), {}, Config(algorithm=algorithm), 0).tokens
    objective, loss, computed = Objective(algorithm), 0.0, 0
    started = time.perf_counter()
    step = assemble(
        [group],
        tokens,
        layout=layout,
        num_ranks=1,
        tokens_per_micro_batch=TOKENS_PER_MICRO_BATCH,
        keep_idle=False,
    )
    for batch in step.micro_batches[0]:
        logprobs, entropy = policy(batch, CPU)
        share = objective(logprobs, entropy, batch).loss
        share.backward()
        loss, computed = loss + share.item(), computed + batch.input_ids.size
    seconds = time.perf_counter() - started
    policy.zero_grad()
    return {"tokens": computed, "seconds": seconds, "loss": loss}


async def measure(shape: Shape, repeats: int) -> dict[str, float]:
    """Show a table of all workloads. Returns the figures of the last line."""
    size = ModelSize(hidden_size=shape.width, num_layers=shape.layers)
    policy = Policy(build_model(VOCAB_SIZE, seed=0, size=size), temperature=1.0)
    figures: dict[str, float] = {}
    for workload in WORKLOADS:
        group = make_group(shape, workload)
        arms = {layout.value: layout for layout in (Layout.tree, Layout.rows)}
        runs = await take_turns(
            lambda layout, _, group=group: train_step(policy, group, layout), arms, repeats, warm_ups=1
        )
        loss = {arm: runs.median("loss", arm) for arm in arms}
        compared = {f"{figure}_{arm}": runs.median(figure, arm) for figure in ("tokens", "seconds") for arm in arms}
        compared |= {f"{figure}_ratio": runs.ratio(figure, "tree", over="rows") for figure in ("tokens", "seconds")}
        compared["loss_difference_ppm"] = abs(loss["tree"] - loss["rows"]) / abs(loss["rows"]) * 1e6
        figures |= {f"{name}_{workload}": value for name, value in compared.items()}
        runs.show(f"sessions: {workload}", {"seconds": ".2f", "tokens": ",.0f"}, over="rows")
    return figures


def main() -> None:
    repeats = make_parser(__doc__, repeats=5).parse_args().repeats
    torch.set_num_threads(1)  # as a train worker on CPUs
    write_json(asyncio.run(measure(Shape(), repeats)))


if __name__ == "__main__":
    main()
