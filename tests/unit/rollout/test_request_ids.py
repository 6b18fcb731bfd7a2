"""The name of a request inside an engine says which it is, and no HTTP client's request is taken for one of ours."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.request_ids import ClientNames, RequestId

NUMBERS = st.integers(0, 200)
IDS = st.builds(
    RequestId,
    ordinal=NUMBERS,
    attempt=NUMBERS,
    episode=NUMBERS,
    turn=NUMBERS,
    part=NUMBERS,
    is_evaluation=st.booleans(),
)


@pytest.mark.parametrize(
    ("request_id", "name"),
    [
        (RequestId(ordinal=17), "17-0"),
        (RequestId(ordinal=17, attempt=1, episode=3, turn=2), "17.1-3-2"),
        (RequestId(ordinal=17, episode=3, part=2), "17-3+part2"),
        (RequestId(ordinal=5, attempt=4, episode=1, is_evaluation=True), "eval-5.4-1"),
    ],
)
def test_a_name_by_hand(request_id: RequestId, name: str) -> None:
    assert str(request_id) == name and RequestId.parse(name) == request_id


@given(IDS)
def test_every_id_is_read_from_its_name_and_sent_between_processes(request_id: RequestId) -> None:
    assert RequestId.parse(str(request_id)) == request_id == pickle.loads(pickle.dumps(request_id))


@given(IDS, st.sampled_from(["cmpl-{}-0", "chatcmpl-{}", "{}~1"]))
def test_a_client_that_chooses_one_of_our_names_gets_none_of_our_requests(request_id: RequestId, made: str) -> None:
    assert RequestId.parse(made.format(request_id)) is None


@pytest.mark.parametrize("name", ["", "17", "a-0", "17-", "17-0+part", "17-0 ", "-17-0", "17.-0"])
def test_what_is_no_name_of_ours_is_none(name: str) -> None:
    assert RequestId.parse(name) is None


def test_clients_know_a_request_by_the_id_in_its_response_and_by_the_one_they_sent() -> None:
    assert ClientNames.of("cmpl-job-7-0") == ClientNames("cmpl-job-7-0", "cmpl-job-7", "job-7")
    assert ClientNames.of("chatcmpl-job-7") == ClientNames("chatcmpl-job-7", "chatcmpl-job-7", "job-7")
    assert set(ClientNames.of("3-0")) == {"3-0"}, "an agent loop's"
