"""Short forms of `Routes`."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rollout.types import Routes, TokenSequence, Trajectory, TrajectoryGroup
from tests.support.fakes import make_prompt, make_trajectory
from tests.support.sequences import with_sequence

LAYERS, TOP_K = 2, 3


def some_routes(rows: Sequence[int | None]) -> Routes:
    """Return rows of two layers and three experts that a number tells apart; None is unknown."""
    experts = np.full((len(rows), LAYERS, TOP_K), 255, np.uint8)
    for place, row in enumerate(rows):
        if row is not None:
            experts[place] = (5 * row + np.arange(LAYERS * TOP_K)).reshape(LAYERS, TOP_K)
    return Routes(experts=experts)


def with_random_routes(
    groups: Sequence[TrajectoryGroup], layers: int, num_experts: int, top_k: int
) -> list[TrajectoryGroup]:
    """Return the groups with a tenth of the inputs of each sequence sent to experts by chance, and the others where the
    model's own routers send them."""
    random = np.random.default_rng(0)

    def routed(trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, sequences=tuple(map(with_routes, trajectory.sequences)))

    def with_routes(sequence: TokenSequence) -> TokenSequence:
        order = random.random((sequence.num_inputs, layers, num_experts)).argsort(-1)[..., :top_k].astype(np.uint8)
        return replace(sequence, routes=Routes(experts=order).where(random.random(len(order)) < 0.1))

    return [replace(group, trajectories=tuple(map(routed, group.trajectories))) for group in groups]


def routed_group(num_prompt: int, rows: Sequence[Sequence[int | None] | None]) -> TrajectoryGroup:
    """Return a group with a prompt of `num_prompt` tokens, whose sequences have these rows, one for each of their
    inputs; None is a sequence of two tokens without any."""
    trajectories = []
    for of_inputs in rows:
        length = 2 if of_inputs is None else len(of_inputs) + 1 - num_prompt
        trajectory = with_sequence(make_trajectory(*[0] * length), prompt_ids=np.full(num_prompt, 7, np.int32))
        if of_inputs is not None:
            trajectory = with_sequence(trajectory, routes=some_routes(of_inputs))
        trajectories.append(trajectory)
    return TrajectoryGroup(prompt=make_prompt(0), trajectories=tuple(trajectories))


def input_rows(group: TrajectoryGroup) -> list[list[int | None]]:
    """Return the rows of the inputs of each sequence, wherever they are."""
    return [rows_of(sequence.input_routes) for each in group.trajectories for sequence in each.sequences]


def rows_of(routes: Routes | None) -> list[int | None]:
    if routes is None:
        return []
    numbers = [None if (row == 255).all() else int(row[0, 0]) // 5 for row in routes.experts]
    assert np.array_equal(some_routes(numbers).experts, routes.experts)
    return numbers
