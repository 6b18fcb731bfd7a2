"""Completions and trajectory groups as columns, for their way from process to process: a few arrays for a whole group.
Pickling objects that have arrays of their own costs as much CPU as the rest of that way.
"""

from collections.abc import Sequence
from dataclasses import fields
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np

from rollout.types import Completion, Prompt, Trajectory, TrajectoryGroup, VersionSpan

T = TypeVar("T", Completion, Trajectory)
Columns = dict[str, Any]
"""Field -> its values, one per object; of a field of arrays one array of all tokens, and the bounds of each."""
PackedGroup = tuple[Prompt, Columns, bool]
"""The prompt, its trajectories, and whether the last of them is the greedy one."""
ARRAYS = frozenset({"token_ids", "logprobs", "prompt_ids", "response_ids", "loss_mask", "rollout_logprobs"})


def pack_completions(completions: Sequence[Completion]) -> Columns:
    return _pack(Completion, completions)


def unpack_completions(columns: Columns) -> list[Completion]:
    """In the order in which they were packed."""
    return _unpack(Completion, columns)


def pack_group(group: TrajectoryGroup) -> PackedGroup:
    has_greedy = group.greedy is not None
    every = (*group.trajectories, group.greedy) if group.greedy is not None else group.trajectories
    return group.prompt, _pack(Trajectory, every), has_greedy


def unpack_group(packed: PackedGroup) -> TrajectoryGroup:
    prompt, columns, has_greedy = packed
    trajectories = _unpack(Trajectory, columns)
    greedy = trajectories.pop() if has_greedy else None
    return TrajectoryGroup(prompt=prompt, trajectories=tuple(trajectories), greedy=greedy)


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
    values = {name: _split(*column) if name in ARRAYS else column for name, column in columns.items()}
    rows = zip(*(values | {"spans": spans}).values(), strict=True)
    return [of(**dict(zip(columns, row, strict=True))) for row in rows]


def _join(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray | None, list[tuple[int, int]]]:
    """One array [sum of all tokens], and where each begins and ends in it. One that is the same in all, as a group's
    prompt is, is there once. None: of nothing."""
    if not arrays:
        return None, []
    if all(array is arrays[0] for array in arrays):
        return arrays[0], [(0, len(arrays[0]))] * len(arrays)
    return np.concatenate(arrays), list(pairwise([0, *accumulate(map(len, arrays))]))


def _split(joined: np.ndarray, bounds: list[tuple[int, int]]) -> list[np.ndarray]:
    return [joined[start:end] for start, end in bounds]
