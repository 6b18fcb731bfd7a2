"""Loss tokens from plain numbers, in float64."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from configs.schema import AlgorithmConfig
from trainer.losses.policy import LossTokens, PolicyLoss, ppo_clip


def float64(values: Sequence[float] | Tensor) -> Tensor:
    return values.double() if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64)


def make_tokens(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Sequence[float] | Tensor,
    *,
    lengths: Sequence[int] | None = None,
    rollout_logprobs: Tensor | None = None,
    selected: Sequence[bool] | None = None,
) -> LossTokens:
    """`lengths`: tokens of each sequence; by default every token is one of its own."""
    num_tokens = len(logprobs)
    lengths = [1] * num_tokens if lengths is None else lengths
    return LossTokens(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        rollout_logprobs=old_logprobs if rollout_logprobs is None else rollout_logprobs,
        advantages=float64(advantages),
        sequences=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64)),
        num_sequences=len(lengths),
        staleness=torch.zeros(num_tokens, dtype=torch.int64),
        selected=torch.tensor([False] * num_tokens if selected is None else selected, dtype=torch.bool),
    )


def evaluate(
    loss: PolicyLoss,
    new: Sequence[float],
    old: Sequence[float],
    advantages: Sequence[float],
    algorithm: AlgorithmConfig | None = None,
    **more: Sequence[int] | Sequence[bool],
) -> tuple[list[float], list[float], list[bool]]:
    """(loss, d sum(loss) / d log pi, is_clipped) per token, for probabilities `new` under pi and `old` under pi_old."""
    logprobs = float64(new).log().requires_grad_()
    tokens = make_tokens(logprobs, float64(old).log(), advantages, **more)  # pyright: ignore[reportArgumentType]
    losses, is_clipped = loss(tokens, AlgorithmConfig() if algorithm is None else algorithm)
    assert losses.shape == is_clipped.shape == logprobs.shape
    losses.sum().backward()
    assert logprobs.grad is not None
    return losses.tolist(), logprobs.grad.tolist(), is_clipped.tolist()


def slow_while_a_file_exists(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Takes ten seconds as long as the file $SLOW_LOSS is there, so that a test decides when a trainer is slow."""
    if Path(os.environ["SLOW_LOSS"]).exists():
        time.sleep(10)
    return ppo_clip(tokens, algorithm)
