"""Trajectories and episodes that are one sequence, as most are."""

from dataclasses import replace
from typing import Any

from rollout.agents.loop import Episode
from rollout.types import TokenSequence, Trajectory


def only(whole: Trajectory | Episode) -> TokenSequence:
    (sequence,) = whole.sequences
    return sequence


def with_sequence(trajectory: Trajectory, **changes: Any) -> Trajectory:
    """A copy, whose only sequence is changed."""
    return replace(trajectory, sequences=(replace(only(trajectory), **changes),))
