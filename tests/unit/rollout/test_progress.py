"""The driver has of each request what its replica reported, piece by piece, whatever report gets lost."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollout.progress import Attempt, PartialCompletion, Progress, ProgressReport, TokenDelta, prompt_checksum
from rollout.request_ids import InGroup, RequestId
from rollout.types import Completion
from tests.support.fakes import make_completion


def rid(name: str) -> RequestId:
    request_id = RequestId.parse(name)
    assert request_id is not None
    return request_id


def report_of(*deltas: TokenDelta) -> ProgressReport:
    return ProgressReport(tokens=0, running=0, paused=False, busy_s=0.0, request_s=0.0, deltas=deltas)


def delta(name: str, start: int, tokens: Completion, checksum: int = 5) -> TokenDelta:
    return TokenDelta(request_id=rid(name), prompt_checksum=checksum, start=start, tokens=tokens)


def tokens_of(partials: dict[InGroup, PartialCompletion]) -> dict[InGroup, list[int]]:
    return {key: partial.completion.token_ids.tolist() for key, partial in partials.items()}


@given(
    versions=st.lists(st.integers(0, 3), min_size=1, max_size=12).map(sorted),
    asked_at=st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=8),
)
def test_pieces_add_up_to_the_whole_whatever_reports_get_lost(
    versions: list[int], asked_at: list[tuple[int, bool]]
) -> None:
    tokens = list(range(20, 20 + len(versions)))
    progress = Progress()
    progress.begin(3, Attempt(), "a")
    for length, arrives in [*sorted(asked_at), (len(tokens), True)]:
        start = progress.known("a").get(rid("3-0"), 0)
        now_there = make_completion(tokens[:length], versions[:length], "")
        if arrives:
            progress.take("a", report_of(delta("3-0", start, now_there.after(start))))
    partial = progress.partials(3)[0, 0].completion
    whole = make_completion(tokens, versions, "")
    assert partial.token_ids.tolist() == tokens and partial.spans == whole.spans
    assert partial.logprobs.tolist() == whole.logprobs.tolist()


def test_only_the_present_attempt_on_its_replica_is_believed() -> None:
    progress, piece = Progress(), make_completion([7], [0], "")
    progress.begin(3, Attempt(number=1), "b")
    for replica, name in (("a", "3.1-0"), ("b", "3-0"), ("b", "4-0"), ("b", "eval-3.1-0")):
        progress.take(replica, report_of(delta(name, 0, piece)))
    assert progress.partials(3) == {} and progress.known("b") == {}
    progress.take("b", report_of(delta("3.1-0", 0, piece), delta("3.1-1-1", 0, piece)))
    assert tokens_of(progress.partials(3)) == {(0, 0): [7], (1, 1): [7]}
    assert progress.known("b") == {rid("3.1-0"): 1, rid("3.1-1-1"): 1} and progress.known("a") == {}
    progress.take("b", report_of(delta("3.1-0", 0, piece)))  # a second time
    assert tokens_of(progress.partials(3))[0, 0] == [7]


def test_an_attempt_starts_with_what_it_goes_on_from_and_ends_with_its_group() -> None:
    progress = Progress()
    had = PartialCompletion(prompt_checksum=5, completion=make_completion([7, 8], [0, 0], ""))
    progress.begin(3, Attempt(number=2, partials={(0, 0): had}), "b")
    assert progress.known("b") == {rid("3.2-0"): 2}
    progress.take("b", report_of(delta("3.2-0", 2, make_completion([9], [1], "stop"))))
    partial = progress.partials(3)[0, 0].completion
    assert partial.token_ids.tolist() == [7, 8, 9] and partial.finish_reason == "stop"
    progress.end(3)
    progress.end(3)
    assert progress.known("b") == {}


def test_a_request_with_another_prompt_is_another_request() -> None:
    """An environment that answered otherwise, the second time."""
    progress = Progress()
    had = PartialCompletion(prompt_checksum=5, completion=make_completion([7, 8], [0, 0], "stop"))
    progress.begin(3, Attempt(number=1, partials={(0, 1): had}), "b")
    progress.take("b", report_of(delta("3.1-0-1", 0, make_completion([4], [1], ""), checksum=6)))
    assert tokens_of(progress.partials(3)) == {(0, 1): [4]} and progress.partials(3)[0, 1].prompt_checksum == 6


def test_tokens_of_another_prompt_are_not_taken_for_the_ends_of_the_old_ones() -> None:
    """The replica was asked for what comes after the two tokens that are known, of the old prompt."""
    progress = Progress()
    had = PartialCompletion(prompt_checksum=5, completion=make_completion([7, 8], [0, 0], ""))
    progress.begin(3, Attempt(number=1, partials={(0, 1): had}), "b")
    new = make_completion([4, 5, 6], [1, 1, 1], "")
    progress.take("b", report_of(delta("3.1-0-1", 2, new.after(2), checksum=6)))
    assert progress.partials(3) == {} and progress.known("b") == {}
    progress.take("b", report_of(delta("3.1-0-1", 0, new, checksum=6)))
    assert tokens_of(progress.partials(3)) == {(0, 1): [4, 5, 6]}


def test_a_request_without_a_token_is_known_to_run_and_no_more() -> None:
    progress, nothing = Progress(), make_completion([], [], "")
    progress.begin(3, Attempt(number=1), "b")
    group = progress.groups[3]
    assert group.running() == []
    progress.take("b", report_of(delta("3.1-0", 0, nothing), delta("3.1-1", 0, make_completion([7], [0], "stop"))))
    assert group.running() == [rid("3.1-0")]
    assert tokens_of(progress.partials(3)) == {(1, 0): [7]}
    progress.take("b", report_of(delta("3.1-0", 0, make_completion([8], [0], "", cached_tokens=2))))
    partial = progress.partials(3)[0, 0].completion
    assert (partial.token_ids.tolist(), partial.cached_tokens, group.running()) == ([8], 2, [rid("3.1-0")])


def test_what_an_environment_said_is_kept_although_the_policy_has_not_answered_yet() -> None:
    progress, nothing = Progress(), make_completion([], [], "")
    progress.begin(3, Attempt(), "b")
    said = replace(delta("3-0-1", 0, nothing), observed=np.array([8, 9], np.int32))
    progress.take("b", report_of(said, replace(said, request_id=rid("3-1-1"), observed=np.array([], np.int32))))
    assert list(progress.partials(3)) == [(0, 1)], "of nothing there is nothing to keep"
    progress.begin(3, Attempt(number=1, partials=progress.partials(3)), "b")
    progress.take("b", report_of(delta("3.1-0-1", 0, make_completion([7], [0], ""))))
    kept = progress.partials(3)[0, 1]
    assert kept.observed is not None and (kept.observed.tolist(), kept.completion.token_ids.tolist()) == ([8, 9], [7])


def test_a_prompts_checksum_is_of_its_tokens() -> None:
    assert prompt_checksum((1, 2)) == prompt_checksum(np.array([1, 2])) != prompt_checksum((2, 1))  # pyright: ignore


def test_a_replica_is_asked_for_the_groups_that_are_on_it_now_and_for_no_others() -> None:
    known = PartialCompletion(prompt_checksum=5, completion=make_completion([7], [0], ""))
    progress, partials = Progress(), {(0, 0): known}
    for ordinal in range(4):
        progress.begin(ordinal, Attempt(partials=partials), f"replica-{ordinal % 2}")
    group = progress.groups[1]
    group.end_attempt()
    assert {name.ordinal for name in progress.known("replica-1")} == {3}, "it is on no replica"
    progress.place(group, "replica-0")
    progress.end(2)
    assert {name.ordinal for name in progress.known("replica-0")} == {0, 1}
    progress.begin(3, Attempt(number=1, partials=partials), "replica-0")
    assert not progress.known("replica-1") and progress.known("replica-2") == {}
    assert {name.attempt for name in progress.known("replica-0") if name.ordinal == 3} == {1}
