"""Reductions over the tokens of each trajectory: [T] values, [T] trajectory numbers 0 .. K - 1 -> [K]."""

import torch
from torch import Tensor


def sums(values: Tensor, trajectories: Tensor, num_trajectories: int) -> Tensor:
    return values.new_zeros(num_trajectories).index_add(0, trajectories, values)


def means(values: Tensor, trajectories: Tensor, num_trajectories: int) -> Tensor:
    """Every trajectory has a token."""
    counts = sums(torch.ones_like(values), trajectories, num_trajectories)
    return sums(values, trajectories, num_trajectories) / counts


def maxima(values: Tensor, trajectories: Tensor, num_trajectories: int) -> Tensor:
    lowest = values.new_full((num_trajectories,), -torch.inf)
    return lowest.scatter_reduce(0, trajectories, values, "amax")
