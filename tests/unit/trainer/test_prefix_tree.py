"""The prefix tree of any sequences, and where it is cut."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.types import IntArray
from trainer.prefix_tree import PrefixTree, common_prefix, cut, lexicographic_order

sequences = st.lists(st.lists(st.sampled_from([0, 1, 300, 2**17]), min_size=1, max_size=8), min_size=1, max_size=12)


def sorted_arrays(given_sequences: list[list[int]]) -> list[IntArray]:
    arrays = [np.array(ids, np.int32) for ids in given_sequences]
    return [arrays[number] for number in lexicographic_order(arrays)]


def test_a_tree_by_hand() -> None:
    """[1 2 3 4], [1 2 5] and [1 2 5 6], as in the docstring."""
    tree = PrefixTree.of(sorted_arrays([[1, 2, 5], [1, 2, 5, 6], [1, 2, 3, 4]]))
    assert tree.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert tree.depths.tolist() == [0, 1, 2, 3, 2, 3]
    assert tree.last.tolist() == [5, 5, 3, 3, 5, 5]
    assert [path.tolist() for path in tree.paths] == [[0, 1, 2, 3], [0, 1, 4], [0, 1, 4, 5]]


@given(sequences)
@settings(max_examples=300, deadline=None)
def test_every_distinct_prefix_is_one_token_that_sees_just_its_own_beginning(given_sequences: list[list[int]]) -> None:
    arrays = sorted_arrays(given_sequences)
    assert [ids.tolist() for ids in arrays] == sorted(given_sequences)
    tree = PrefixTree.of(arrays)
    prefixes = {tuple(ids[: end + 1]) for ids in given_sequences for end in range(len(ids))}
    places = np.arange(len(tree.token_ids))
    seen = []
    for place in places:
        visible = (places <= place) & (place <= tree.last)
        assert tree.depths[visible].tolist() == list(range(tree.depths[place] + 1))
        seen.append(tuple(tree.token_ids[visible].tolist()))
    assert len(seen) == len(prefixes) and set(seen) == prefixes
    for ids, path in zip(arrays, tree.paths, strict=True):
        assert np.array_equal(tree.token_ids[path], ids) and np.array_equal(tree.depths[path], np.arange(len(ids)))


@given(sequences, st.integers(1, 40))
def test_the_parts_of_a_cut_are_all_sequences_and_fit_the_budget(
    given_sequences: list[list[int]], max_tokens: int
) -> None:
    arrays = sorted_arrays(given_sequences)
    parts = cut(arrays, max_tokens)
    assert [number for part in parts for number in range(len(arrays))[part]] == list(range(len(arrays)))
    for part in parts:
        tree = PrefixTree.of(arrays[part])
        assert len(tree.token_ids) <= max_tokens or len(arrays[part]) == 1


def test_sequences_that_share_little_are_cut_apart_unless_one_is_the_beginning_of_the_other() -> None:
    long = [1, *range(10, 18)]
    assert cut(sorted_arrays([[1, 2, 3, 4], [1, 2, 3, 5]]), 99) == [slice(0, 2)]
    assert cut(sorted_arrays([[1, 2, 3, 4], long]), 99) == [slice(0, 1), slice(1, 2)]
    assert cut(sorted_arrays([[1], long]), 99) == [slice(0, 2)]


def test_nothing_is_cut_of_nothing() -> None:
    assert cut([], 10) == []


@pytest.mark.parametrize(
    ("one", "other", "shared"), [([1], [2], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 5], 1)]
)
def test_common_prefixes(one: list[int], other: list[int], shared: int) -> None:
    assert common_prefix(np.array(one, np.int32), np.array(other, np.int32)) == shared
