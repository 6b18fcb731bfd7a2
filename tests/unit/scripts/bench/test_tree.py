"""The benchmark of trees in its tiny form: what its three workloads share, and what is in its last line."""

import asyncio

from scripts.bench.tree import Shape, make_group, measure

TINY = Shape(group_size=4, turn_tokens=4, width=64, layers=1)


def distinct_prefixes(workload: str) -> int:
    """Count the different prefixes of all inputs, which end before the last sampled token."""
    group = make_group(TINY, workload)
    found = set()
    for sequence in (sequence for trajectory in group.trajectories for sequence in trajectory.sequences):
        ids = sequence.token_ids.tolist()
        last = len(sequence.prompt_ids) + sequence.loss_mask.nonzero()[0][-1]
        found |= {tuple(ids[:length]) for length in range(1, last + 1)}
    return len(found)


def test_trees_compute_what_is_shared_once() -> None:
    """A prompt of 96 tokens, and 8 turns of 4, of which the last ends with the 2 that are sampled."""
    figures = asyncio.run(measure(TINY, repeats=1))
    assert figures["tokens_tree_linear"] == distinct_prefixes("linear") < 0.5 * figures["tokens_rows_linear"]
    assert figures["tokens_tree_branches"] == distinct_prefixes("branches") < 0.1 * figures["tokens_rows_branches"]
    assert figures["tokens_tree_nothing"] == figures["tokens_rows_nothing"] == figures["tokens_rows_linear"]
    assert figures["tokens_rows_linear"] == 4 * (96 + 29)
    for workload in ("linear", "branches", "nothing"):
        assert figures[f"loss_difference_ppm_{workload}"] < 10
        assert figures[f"seconds_tree_{workload}"] > 0
