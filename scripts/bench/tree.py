"""What trainer.layout=tree saves: tokens computed and seconds of forward and backward, over a row per sequence.

python -m scripts.bench.tree [--repeats 5] [--turns 8] [--group-size 8] [--turn-tokens 16] [--width 256] [--layers 3]

Groups of sessions on one CPU core, with random tokens and weights. A turn is an answer of the model and as many tokens
of the other side. Both layouts train the same step, by turns.

- linear: no branches; the prompt is three quarters of every sequence, and shared by the group.
- branches: the same, and each turn of a session was sampled twice: a second answer branches off that leads no further.
- nothing: no branches, and every session has a prompt of its own.

The last line of the output is JSON, with medians over the repetitions for each of the three:

    tokens_tree_<name>, tokens_rows_<name>     tokens computed, padding included
    seconds_tree_<name>, seconds_rows_<name>   layout, forward and backward of the step
    tokens_ratio_<name>, seconds_ratio_<name>  tree over rows
    loss_difference_ppm_<name>                 of the two losses, in millionths of them
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy as np
import torch

from configs.algorithm import AlgorithmConfig
from configs.schema import Config, Layout
from rollout.types import IntArray, Prompt, TokenSequence, Trajectory, TrajectoryGroup, VersionSpan
from scripts.bench.common import interleaved, median_ratio, show_table, write_json
from trainer.advantages.credit import assign_credit
from trainer.batch import assemble
from trainer.losses.objective import Objective
from trainer.tiny.model import VOCAB_SIZE, ModelSize, build_model
from trainer.tokens import sampled_tokens
from trainer.worker.model import Policy

WORKLOADS = ("linear", "branches", "nothing")
LAYOUTS = {"tree": Layout.tree, "rows": Layout.rows}
SHARED = 3
"""A prompt has so many times the tokens of all turns."""
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sessions of a group and the model that learns from them."""

    turns: int = 8
    group_size: int = 8
    turn_tokens: int = 16
    """Half of them sampled."""
    width: int = 256
    layers: int = 3
    tokens_per_micro_batch: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    tokens: int
    seconds: float
    loss: float


def make_group(shape: Shape, workload: str) -> TrajectoryGroup:
    """A group of sessions, half of them rewarded."""
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
    sequences = [_sequence(prompt_ids, response_ids, loss_mask)]
    for start in range(0, len(response_ids) if has_branches else 0, shape.turn_tokens):
        begun = np.concatenate([prompt_ids, response_ids[:start]])
        other_ids = random.integers(4, VOCAB_SIZE, answer).astype(np.int32)
        sequences.append(_sequence(begun, other_ids, np.ones(answer, np.bool_)))
    return tuple(sequences)


def _sequence(prompt_ids: IntArray, response_ids: IntArray, loss_mask: np.ndarray) -> TokenSequence:
    return TokenSequence(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        loss_mask=loss_mask,
        rollout_logprobs=np.where(loss_mask, -np.log(VOCAB_SIZE), 0).astype(np.float32),
        spans=(VersionSpan(0, len(response_ids), 0),),
    )


async def train_step(policy: Policy, group: TrajectoryGroup, layout: Layout, budget: int, repetition: int) -> Outcome:
    """Forward and backward of one step, whose gradient is thrown away."""
    algorithm = AlgorithmConfig()
    tokens = assign_credit([group], sampled_tokens([group], 0), {}, Config(algorithm=algorithm), 0).tokens
    objective, loss, computed = Objective(algorithm), 0.0, 0
    started = time.perf_counter()
    step = assemble([group], tokens, layout=layout, num_ranks=1, tokens_per_micro_batch=budget, keep_idle=False)
    for batch in step.micro_batches[0]:
        logprobs, entropy = policy(batch, CPU)
        share = objective(logprobs, entropy, batch).loss
        share.backward()
        loss, computed = loss + share.item(), computed + batch.input_ids.size
    seconds = time.perf_counter() - started
    policy.zero_grad()
    return Outcome(tokens=computed, seconds=seconds, loss=loss)


async def measure(shape: Shape, repeats: int) -> dict[str, float]:
    """Show a table of all workloads. Returns the figures of the last line."""
    size = ModelSize(hidden_size=shape.width, num_layers=shape.layers)
    policy = Policy(build_model(VOCAB_SIZE, seed=0, size=size), temperature=1.0)
    figures: dict[str, float] = {}
    rows = []
    for workload in WORKLOADS:
        group = make_group(shape, workload)
        arms = {
            name: partial(train_step, policy, group, layout, shape.tokens_per_micro_batch)
            for name, layout in LAYOUTS.items()
        }
        await interleaved(arms, 1)  # the first of each pays for memory and imports
        outcomes = await interleaved(arms, repeats)
        found = _figures(outcomes["tree"], outcomes["rows"])
        figures |= {f"{name}_{workload}": value for name, value in found.items()}
        rows.append([workload, *(f"{value:.3g}" for value in found.values())])
    show_table("tree over a row per sequence", ["", *found], rows)
    return figures


def _figures(tree: Sequence[Outcome], rows: Sequence[Outcome]) -> dict[str, float]:
    in_tree, in_rows = [one.seconds for one in tree], [one.seconds for one in rows]
    return {
        "tokens_tree": tree[0].tokens,
        "tokens_rows": rows[0].tokens,
        "tokens_ratio": tree[0].tokens / rows[0].tokens,
        "seconds_tree": median(in_tree),
        "seconds_rows": median(in_rows),
        "seconds_ratio": median_ratio(in_tree, in_rows),
        "loss_difference_ppm": abs(tree[0].loss - rows[0].loss) / abs(rows[0].loss) * 1e6,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    for name in ("turns", "group_size", "turn_tokens", "width", "layers"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Shape(), name))
    options = vars(parser.parse_args(arguments))
    repeats = options.pop("repeats")
    torch.set_num_threads(1)  # as a train worker on CPUs
    write_json(asyncio.run(measure(replace(Shape(), **options), repeats)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
