"""Refuses a model whose logprobs the train workers would compute otherwise than the model's own forward does.

A wrong mask or head does not crash: the run learns from wrong probabilities. So every model is tried when it is loaded.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from configs.mixture import longest_source
from configs.schema import Config, Layout
from configs.validate import ConfigError
from rollout.types import IntArray, Prompt, TokenSequence, Trajectory, TrajectoryGroup, VersionSpan
from trainer.batch import assemble
from trainer.old_logprobs import mixed_batch
from trainer.tokens import sampled_tokens
from trainer.worker.attention.attention import LONGEST_MASK, takes_tensors
from trainer.worker.model import Policy, vocab_size
from trainer.worker.segments import SegmentCache

SHAPES = ((24, 24, 9), (9, 17, 2))
"""(prompt's tokens, response's tokens, trajectories) of each group. A trajectory is a response, and a branch that
leaves it half way and ends where it ends. The first group is a tree of 330 tokens, so that attention by places in the
row, instead of positions in the sequence, shows up to a window of 256. Masks of the model's own are functions of
positions, whatever their window (`attention/`). The second tree comes after it in the row; where each sequence has a
row of its own, the rest is padding."""
LARGEST_TOKEN = 1000
"""Token ids are drawn below it: special tokens of images and the like come later in a vocabulary."""
CHUNKS = 3
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Largest mean difference of logprobs, as a share of their standard deviation over the tokens."""
ROUNDING = 8 * torch.finfo(torch.float32).eps
"""The difference that rounding alone makes, as a share of the logprobs. It counts where all tokens are about as likely,
as with a head of zeros, and their deviation is about zero."""


def refuse_other_logprobs(policy: Policy, config: Config, device: torch.device) -> None:
    """Compare random rows through the run's layout with plain forwards of each sequence. All ranks must call.

    Raises:
        ConfigError: they differ. It names the architecture and the layout that works.
    """
    trainer, architecture = config.trainer, type(policy.causal_lm).__name__
    _refuse_stretched_positions(policy.causal_lm.config.get_text_config(), config, architecture)
    _refuse_long_masks(policy, config, architecture)
    register_fsdp_forward_method(policy, "plain_logprobs")
    dtype = getattr(torch, trainer.dtype.value)
    groups = _random_groups(min(vocab_size(policy.causal_lm), LARGEST_TOKEN))
    with torch.no_grad():
        plain = torch.cat([_plain_logprobs(policy, group, device) for group in groups])
        problem = _problem(policy, groups, plain, trainer.layout, dtype, device)
        if isinstance(policy, FSDPModule):
            policy.reshard()  # FSDP2 leaves the root gathered, as if a backward came
        if problem is None:
            return
        others = [layout for layout in Layout if layout is not trainer.layout]
        works = [other for other in others if _problem(policy, groups, plain, other, dtype, device) is None]
    key = f"trainer.layout={trainer.layout.value}"
    advice = f"set trainer.layout={works[0].value}, which works" if works else "no layout works with it"
    if trainer.sequence_parallel > 1:  # a state that runs through the row does not pass from rank to rank
        key += f" trainer.sequence_parallel={trainer.sequence_parallel}"
        advice = advice if works else "no layout works with shared rows: set trainer.sequence_parallel=1"
    raise ConfigError(f"{key}: {architecture} {problem}: {advice}")


def refuse_other_segments(policy: Policy, config: Config, device: torch.device) -> None:
    """Compare the same rows, computed in segments as by two versions (algorithm.proximal=exact), with plain forwards of
    each sequence. All ranks must call.

    Raises:
        ConfigError: they differ, as where a state other than keys and values runs through a row.
    """
    groups = [_spanning(group) for group in _random_groups(min(vocab_size(policy.causal_lm), LARGEST_TOKEN))]
    tokens = sampled_tokens(groups, global_steps=2)
    single = replace(config, trainer=replace(config.trainer, num_ranks=1, tokens_per_micro_batch=2**62))
    batch = mixed_batch(groups, replace(tokens, advantages=np.ones_like(tokens.advantages)), single, global_steps=2)
    assert batch is not None
    [[row]], problem = batch.rows, None
    with torch.no_grad():
        plain = torch.cat([_plain_logprobs(policy, group, device) for group in groups])
        expected = plain[torch.as_tensor(row.batch.index % batch.num_tokens, device=device)]
        cache, logprobs = SegmentCache(len(row.owners)), torch.full_like(expected, torch.nan)
        try:
            for version in (0, 1):
                segment = row.segment(version)
                logprobs[torch.as_tensor(segment.targets)] = policy.segment_logprobs(segment, cache, device)
            difference = (logprobs - expected).abs().mean()
            if not difference <= _largest_difference(expected, getattr(torch, config.trainer.dtype.value)):
                problem = f"its logprobs come out otherwise, by {difference.item():.2g} nats a token"
        except Exception as error:  # of any class, as above
            problem = f"it cannot be computed so ({type(error).__name__}: {error})"
        if isinstance(policy, FSDPModule):
            policy.reshard()
    if problem is not None:
        how = "a row is computed in segments by version, on the keys and values of those before"
        others = "set algorithm.proximal=rollout, current or interpolated"
        raise ConfigError(
            f"algorithm.proximal=exact: {how}, and of {type(policy.causal_lm).__name__} {problem}: {others}"
        )


def _spanning(group: TrajectoryGroup) -> TrajectoryGroup:
    """Return the group with responses that version 0 began and version 1 went on with."""

    def spanning(sequence: TokenSequence) -> TokenSequence:
        half, length = len(sequence.response_ids) // 2, len(sequence.response_ids)
        return replace(sequence, spans=(VersionSpan(0, half, 0), VersionSpan(half, length, 1)))

    return replace(
        group,
        trajectories=tuple(
            replace(trajectory, sequences=tuple(map(spanning, trajectory.sequences)))
            for trajectory in group.trajectories
        ),
    )


def _refuse_stretched_positions(model: Any, config: Config, architecture: str) -> None:
    """Refuse rotary embeddings that depend on the longest sequence of a batch, as then a token's logprob does too.

    Args:
        model: the model's own config.
    """
    parameters = model.to_dict().get("rope_parameters") or {}
    longest = longest_source(config)
    prompt, response = longest.data.max_prompt_tokens, longest.rollout.max_response_tokens
    by_layer_kind = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in [parameters, *by_layer_kind]:
        match rope:
            case {"rope_type": "longrope", "original_max_position_embeddings": int(limit)}:
                pass
            case {"rope_type": "dynamic"}:
                limit = model.max_position_embeddings
            case _:
                continue
        if prompt + response > limit:
            raise ConfigError(
                f"rollout.max_response_tokens={response}: must be at most {limit - prompt} with {architecture} and "
                f"data.max_prompt_tokens={prompt}: beyond {limit} tokens its positions (rope_type={rope['rope_type']}) "
                "depend on the longest sequence of a batch, and no layout repeats what was sampled"
            )


def _refuse_long_masks(policy: Policy, config: Config, architecture: str) -> None:
    """Refuse rows that are too long for masks of all pairs. A sequence in a row by itself needs none."""
    trainer, its = config.trainer, longest_source(config)
    longest = max(trainer.tokens_per_micro_batch, its.context_tokens)
    if trainer.layout is Layout.rows or not takes_tensors(policy.causal_lm) or longest <= LONGEST_MASK:
        return
    raise ConfigError(
        f"trainer.layout={trainer.layout.value}: {architecture} has attention of its own, with masks of all pairs of a "
        f"row, which are made up to {LONGEST_MASK} tokens: trainer.tokens_per_micro_batch and data.max_prompt_tokens + "
        "rollout.max_response_tokens must be at most as many, or trainer.layout=rows"
    )


def _problem(
    policy: Policy,
    groups: list[TrajectoryGroup],
    plain: Tensor,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Return a description of the model's error in this layout, or None."""
    step = assemble(
        groups, sampled_tokens(groups, 0), layout=layout, num_ranks=1, tokens_per_micro_batch=2**62, keep_idle=True
    )
    [[batch]] = step.micro_batches
    max_logits = len(plain) // CHUNKS * vocab_size(policy.causal_lm)
    try:
        logprobs, _ = policy(batch, device, max_logits)
    except Exception as error:  # of any class: it is the model's code that meets inputs it may not be made for
        return f"cannot compute rows of this layout ({type(error).__name__}: {error})"
    expected = plain[torch.as_tensor(batch.index, device=device)]
    difference = (logprobs - expected).abs().mean()
    if difference <= _largest_difference(expected, dtype):
        return None
    return f"computes other logprobs in this layout than in a plain forward, by {difference.item():.2g} nats a token"


def _largest_difference(expected: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest mean difference from these logprobs that is allowed."""
    return torch.maximum(TOLERANCE[dtype] * expected.std(), ROUNDING * expected.abs().mean())


def _plain_logprobs(policy: Policy, group: TrajectoryGroup, device: torch.device) -> Tensor:
    """Return the logprobs [T] of the group's responses, one after another, each in a row of its own without padding."""
    sequences = [sequence for trajectory in group.trajectories for sequence in trajectory.sequences]
    token_ids = np.stack([sequence.token_ids for sequence in sequences]).astype(np.int64)  # all are of one length
    logprobs = policy.plain_logprobs(torch.as_tensor(token_ids, device=device))
    starts = [len(sequence.prompt_ids) - 1 for sequence in sequences]
    return torch.cat([row[start:] for row, start in zip(logprobs, starts, strict=True)])


def _random_groups(num_tokens: int) -> list[TrajectoryGroup]:
    """Return random groups, the same on every rank."""
    random = np.random.default_rng(0)
    groups = []
    for ordinal, (prompt_length, length, size) in enumerate(SHAPES):
        prompt_ids = random.integers(num_tokens, size=prompt_length).astype(np.int32)
        trajectories = []
        for _ in range(size):
            response_ids = random.integers(num_tokens, size=length).astype(np.int32)
            other_ids = random.integers(num_tokens, size=length - length // 2).astype(np.int32)
            begun = np.concatenate([prompt_ids, response_ids[: length // 2]])
            sequences = (_sampled(prompt_ids, response_ids), _sampled(begun, other_ids))
            trajectories.append(Trajectory(sequences=sequences, reward=0.0, finish_reason="stop", text="", replica=""))
        prompt = Prompt(ordinal=ordinal, text="", token_ids=tuple(prompt_ids.tolist()), ground_truth="")
        groups.append(TrajectoryGroup(prompt=prompt, trajectories=tuple(trajectories)))
    return groups


def _sampled(prompt_ids: IntArray, response_ids: IntArray) -> TokenSequence:
    length = len(response_ids)
    return TokenSequence(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        loss_mask=np.ones(length, np.bool_),
        rollout_logprobs=np.zeros(length, np.float32),
        spans=(VersionSpan(0, length, 0),),
    )
