"""Sequences end to end (trainer.layout=packed) against a padded row for each, forward and backward of one step."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch

from configs.schema import Layout
from rollout.types import Prompt, TokenSequence, Trajectory, TrajectoryGroup, VersionSpan
from scripts.bench.common import interleaved, median_ratio, show_table
from trainer.batch import StepBatch, assemble
from trainer.tiny.model import VOCAB_SIZE, ModelSize, build_model
from trainer.tokens import sampled_tokens
from trainer.worker.model import Policy

LAYOUTS = {"packed": Layout.packed, "rows": Layout.rows}
CPU = torch.device("cpu")
PROMPT, SPREAD = 32, 0.8
"""Tokens of a prompt, and the standard deviation of the logarithm of a response's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingShape:
    """What is trained, and the model."""

    sequences: int = 32
    response: int = 128
    """Tokens of the median response; lengths are log-normal."""
    longest: int = 1024
    tokens_per_micro_batch: int = 2048
    hidden: int = 256
    layers: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    seconds: float
    """Of forward and backward, on one core's clock of the process."""
    computed: int
    """Tokens, padding included."""
    logprobs: np.ndarray
    """[T] in the order of the step."""


def make_groups(shape: PackingShape) -> list[TrajectoryGroup]:
    """A response to a group, so that nothing is shared."""
    random = np.random.default_rng(0)
    lengths = np.exp(random.normal(np.log(shape.response), SPREAD, shape.sequences)).astype(int).clip(2, shape.longest)
    groups = []
    for ordinal, length in enumerate(lengths.tolist()):
        ids = random.integers(4, VOCAB_SIZE, PROMPT + length).astype(np.int32)
        sequence = TokenSequence(
            prompt_ids=ids[:PROMPT],
            response_ids=ids[PROMPT:],
            loss_mask=np.ones(length, np.bool_),
            rollout_logprobs=np.zeros(length, np.float32),
            spans=(VersionSpan(0, length, 0),),
        )
        trajectory = Trajectory(sequences=(sequence,), reward=0.0, finish_reason="stop", text="", replica="")
        prompt = Prompt(ordinal=ordinal, text="", token_ids=tuple(ids[:PROMPT].tolist()), ground_truth="")
        groups.append(TrajectoryGroup(prompt=prompt, trajectories=(trajectory,)))
    return groups


def assembled(groups: Sequence[TrajectoryGroup], layout: Layout, budget: int) -> StepBatch:
    tokens = sampled_tokens(groups, 0)
    return assemble(groups, tokens, layout=layout, num_ranks=1, tokens_per_micro_batch=budget, keep_idle=True)


async def train(policy: Policy, step: StepBatch, repetition: int) -> Outcome:
    """The gradient, of the sum of all logprobs, is thrown away."""
    batches = step.micro_batches[0]
    logprobs = []
    started = time.process_time()
    for batch in batches:
        found, _ = policy(batch, CPU)
        found.sum().backward()
        logprobs.append(found.detach().numpy())
    seconds = time.process_time() - started
    policy.zero_grad()
    computed = sum(batch.input_ids.size for batch in batches)
    return Outcome(seconds=seconds, computed=computed, logprobs=step.gather([logprobs]))


async def measure_packing(shape: PackingShape, repeats: int) -> dict[str, float]:
    """Show a table. Returns the figures of the last line."""
    policy = Policy(
        build_model(VOCAB_SIZE, seed=0, size=ModelSize(hidden_size=shape.hidden, num_layers=shape.layers)),
        temperature=1.0,
    )
    groups = make_groups(shape)
    steps = {name: assembled(groups, layout, shape.tokens_per_micro_batch) for name, layout in LAYOUTS.items()}
    arms = {name: partial(train, policy, step) for name, step in steps.items()}
    await interleaved(arms, 1)  # the first of each pays for memory and imports
    outcomes = await interleaved(arms, repeats)
    num_tokens = outcomes["packed"][0].computed  # without padding
    figures: dict[str, float] = {}
    rows = []
    for name, found in outcomes.items():
        seconds, share = median(one.seconds for one in found), 1 - num_tokens / found[0].computed
        figures |= {f"packing_tokens_per_s_{name}": num_tokens / seconds, f"packing_padding_share_{name}": share}
        rows.append([name, f"{num_tokens / seconds:.0f}", f"{share:.1%}", str(len(steps[name].micro_batches[0]))])
    show_table(f"{num_tokens} tokens in {shape.sequences} sequences", ["", "tokens/s", "padding", "batches"], rows)
    seconds = {name: [one.seconds for one in found] for name, found in outcomes.items()}
    differs = np.abs(outcomes["packed"][0].logprobs - outcomes["rows"][0].logprobs).max()
    return figures | {
        "packing_speedup": median_ratio(seconds["rows"], seconds["packed"]),
        "packing_logprob_difference": float(differs),
    }
