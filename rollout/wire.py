"""Completions and trajectory groups as columns, for their way between processes: a few arrays for a whole group.

Pickling objects with arrays of their own costs as much CPU as the rest of that way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np

from rollout.types import Completion, Prompt, Trajectory, TrajectoryGroup, VersionSpan

T = TypeVar("T", Completion, Trajectory)
Columns = dict[str, Any]
"""Field -> its values, one per object. A field of arrays is one array of all tokens, and the bounds of each."""
ARRAYS = frozenset({"token_ids", "logprobs", "prompt_ids", "response_ids", "loss_mask", "rollout_logprobs"})


@dataclass(frozen=True, slots=True, eq=False)
class PackedGroup:
    prompt: Prompt
    trajectories: Columns
    has_greedy: bool
    """The last trajectory is the greedy one."""


def pack_completions(completions: Sequence[Completion]) -> Columns:
    return _pack(Completion, completions)


def unpack_completions(columns: Columns) -> list[Completion]:
    return _unpack(Completion, columns)


def pack_group(group: TrajectoryGroup) -> PackedGroup:
    every = group.trajectories if group.greedy is None else (*group.trajectories, group.greedy)
    return PackedGroup(group.prompt, _pack(Trajectory, every), has_greedy=group.greedy is not None)


def unpack_group(packed: PackedGroup) -> TrajectoryGroup:
    trajectories = _unpack(Trajectory, packed.trajectories)
    greedy = trajectories.pop() if packed.has_greedy else None
    return TrajectoryGroup(prompt=packed.prompt, trajectories=tuple(trajectories), greedy=greedy)


def _pack(of: type[T], objects: Sequence[T]) -> Columns:
    columns: Columns = {}
    for name in (field.name for field in fields(of)):
        values = [getattr(one, name) for one in objects]
        if name in ARRAYS:
            columns[name] = _join(values)
        elif name == "spans":
            columns[name] = [[(s.start, s.end, s.global_steps) for s in spans] for spans in values]
        else:
            columns[name] = values
    return columns


def _unpack(of: type[T], columns: Columns) -> list[T]:
    spans = [tuple(VersionSpan(*span) for span in spans) for spans in columns["spans"]]
    values = columns | {"spans": spans}
    for name in ARRAYS & columns.keys():
        joined, bounds = columns[name]
        values[name] = [joined[start:end] for start, end in bounds]
    rows = zip(*values.values(), strict=True)
    return [of(**dict(zip(columns, row, strict=True))) for row in rows]


def _join(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray | None, list[tuple[int, int]]]:
    """One array [sum of all tokens] (None without any), and where each begins and ends in it. An array that all objects
    share, as the prompt of a group, is stored once."""
    if not arrays:
        return None, []
    if all(array is arrays[0] for array in arrays):
        return arrays[0], [(0, len(arrays[0]))] * len(arrays)
    return np.concatenate(arrays), list(pairwise([0, *accumulate(map(len, arrays))]))
