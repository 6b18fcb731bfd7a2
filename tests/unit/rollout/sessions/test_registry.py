"""Keys of sessions: whose session each opens, what it may do there, and what is known of it."""

import pytest
from starlette.datastructures import Headers

from rollout.sessions.errors import ForbiddenError, UnknownKeyError, UnknownSessionError
from rollout.sessions.registry import SessionKeys


def bearer(key: str) -> Headers:
    return Headers({"authorization": f"Bearer {key}"})


@pytest.mark.parametrize("may_steer", [False, True])
def test_a_key_opens_its_own_session_and_no_other(may_steer: bool) -> None:
    keys = SessionKeys()
    own, other = (keys.issue(session, may_steer=may_steer) for session in ("own", "other"))
    for headers in (bearer(own), Headers({"x-api-key": own})):
        assert keys.find_session(headers, None) == keys.find_session(headers, "own") == "own"
        for path in ("other", "", "OWN", "own "):
            with pytest.raises(UnknownSessionError):
                keys.find_session(headers, path)
    keys.revoke("own")
    for path in (None, "own", "other"):
        with pytest.raises(UnknownKeyError):
            keys.find_session(bearer(own), path)
    assert keys.find_session(bearer(other), "other") == "other"


def test_no_guess_near_a_key_opens_anything() -> None:
    keys = SessionKeys()
    key = keys.issue("own")
    for guess in ("", key[:-1], key + "a", key.upper(), key[:-1] + ("a" if key[-1] != "a" else "b"), "own", "session-"):
        with pytest.raises(UnknownKeyError):
            keys.find_session(bearer(guess), "own")


def test_the_key_of_an_agent_neither_rewards_nor_aborts_its_session() -> None:
    keys = SessionKeys()
    key, agent_key = keys.issue("own"), keys.issue("own", may_steer=False)
    assert key != agent_key and keys.find_session(bearer(key), "own", steers=True) == "own"
    with pytest.raises(ForbiddenError, match=r"sessions\.command_reward=true"):
        keys.find_session(bearer(agent_key), "own", steers=True)
    keys.revoke("own")
    for each in (key, agent_key):
        with pytest.raises(UnknownKeyError):
            keys.find_session(bearer(each), "own")


def test_only_digests_of_keys_are_kept_so_that_the_time_of_a_look_up_tells_nothing() -> None:
    keys = SessionKeys()
    issued = [keys.issue("own"), keys.issue("own", may_steer=False)]
    assert all(len(digest) == 32 for digest in keys._holders)
    assert not any(key[8:] in repr(keys) or key.encode() in keys._holders for key in issued)
