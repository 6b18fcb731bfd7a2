"""The tokens of a trajectory on the page: branches as a tree, and what rollout and trainer made of each."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.dashboard.tokens import CLIPPED, NO_FATE, REJECTED, Branch, branches, token_strip
from scripts.observe.run import Run
from tests.support.dashboards import BRANCHED, simulated_run


def arrays(*sequences: list[int]) -> list[np.ndarray]:
    return [np.array(one, np.int32) for one in sequences]


def test_what_sequences_have_in_common_is_there_once() -> None:
    assert branches(arrays([1, 2, 5], [1, 2, 6], [1, 2, 6, 7])) == [
        Branch(None, (0, 1, 2), 0, 2),
        Branch(0, (0,), 2, 3),
        Branch(0, (1, 2), 2, 3),
        Branch(2, (2,), 3, 4),
    ]
    assert branches(arrays([1, 2])) == [Branch(None, (0,), 0, 2)]
    assert [branch.parent for branch in branches(arrays([1], [2]))] == [None, None]
    assert branches([]) == []


@given(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=6), min_size=1, max_size=6))
def test_from_the_root_to_a_sequence_s_last_branch_is_the_sequence(sequences: list[list[int]]) -> None:
    tree = branches(arrays(*sequences))
    for number, sequence in enumerate(sequences):
        own = [branch for branch in tree if number in branch.sequences]
        assert [token for branch in own for token in sequence[branch.start : branch.end]] == sequence
        assert [branch.parent for branch in own] == [None, *(tree.index(branch) for branch in own[:-1])]
    seen = {(branch.start, *sequences[branch.sequences[0]][: branch.end]) for branch in tree}
    assert len(seen) == len(tree), "no two branches are the same tokens"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run.open(simulated_run(tmp_path_factory.mktemp("runs") / "new"))


def test_tokens_have_what_the_trainer_made_of_them(run: Run) -> None:
    """The files hold the loss tokens without those that are not trained, wherever in the step they are."""
    path = run.tokens_path(BRANCHED)
    with np.load(path) as file:
        logprobs, advantages = file["trainer_logprobs"], file["token_advantages"]
        clipped, rejected = file["is_clipped"], file["is_rejected"]
    found = []
    for entry in run.index(BRANCHED).entries:
        strip = token_strip(run, BRANCHED, entry)
        assert strip["has_trainer"] and strip["left_out"] == 0
        by_sequence = [[token for token in branch["tokens"] if token[4]] for branch in strip["branches"]]
        found += [token for tokens in by_sequence for token in tokens]
    assert len(found) == len(logprobs)
    assert sorted(token[6] for token in found) == pytest.approx(sorted(logprobs.tolist()), abs=1e-5)
    assert sorted(token[7] for token in found) == pytest.approx(sorted(advantages.tolist()), abs=1e-5)
    fates = [token[8] for token in found]
    assert [fates.count(fate) for fate in (CLIPPED, REJECTED)] == [(clipped & ~rejected).sum(), rejected.sum()]
    simple = token_strip(run, BRANCHED, run.index(BRANCHED).entries[-1])["branches"][0]["tokens"]
    trained = [token for token in simple if token[4]]
    assert [token[6] for token in trained] == pytest.approx(logprobs[-len(trained) :].tolist(), abs=1e-5)


def test_a_session_is_its_common_prefix_once_and_the_branches_below(run: Run) -> None:
    entry = run.index(BRANCHED).entries[0]
    whole, *others = entry.row.sequences
    strip = token_strip(run, BRANCHED, entry)
    root, rest, given_again, *ends = strip["branches"]
    assert strip["num_sequences"] == 3 and [branch["parent"] for branch in strip["branches"]] == [None, 0, 0, 2, 2]
    assert [list(branch["sequences"]) for branch in strip["branches"]] == [[0, 1, 2], [0], [1, 2], [1], [2]]
    assert root["size"] == whole.prompt_tokens + whole.response_tokens // 2 == others[0].prompt_tokens
    sampled = root["tokens"][whole.prompt_tokens :]
    assert all(token[4] and not token[5] and token[2] is not None for token in sampled), (
        "as the first sequence has them"
    )
    assert [token[2] for token in given_again["tokens"][:4]] == [None] * 4
    assert [len(end["tokens"]) for end in ends] == [1, 2] and all(token[4] for end in ends for token in end["tokens"])
    assert len(rest["tokens"]) == whole.response_tokens - whole.response_tokens // 2


def test_pages_of_tokens_make_the_whole(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = run.index(BRANCHED).entries[0]
    whole = [token for branch in token_strip(run, BRANCHED, entry)["branches"] for token in branch["tokens"]]
    monkeypatch.setattr("scripts.dashboard.tokens.MOST_TOKENS", 7)
    paged, start = [], 0
    while True:
        strip = token_strip(run, BRANCHED, entry, start)
        paged += [token for branch in strip["branches"] for token in branch["tokens"]]
        assert strip["left_out"] == max(0, len(whole) - start - 7)
        start += 7
        if not strip["left_out"]:
            break
    assert paged == whole


def test_a_file_of_an_older_version_has_no_logprobs_of_the_trainer(tmp_path: Path) -> None:
    run = Run.open(simulated_run(tmp_path / "new"))
    path = run.tokens_path(1)
    with np.load(path) as file:
        kept = {name: file[name] for name in file.files if name not in ("trainer_logprobs", "is_clipped")}
    np.savez(path, **{name: array for name, array in kept.items() if name not in ("is_rejected", "token_advantages")})
    strip = token_strip(run, 1, run.index(1).entries[0])
    tokens = strip["branches"][0]["tokens"]
    assert not strip["has_trainer"] and all(token[6:] == [None, None, NO_FATE] for token in tokens)
