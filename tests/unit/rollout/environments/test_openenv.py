"""Episodes against OpenEnv servers in processes of their own: one after the documented wire form, and where the package
is installed one of its own server classes."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from rollout.agents.loop import load_agent_loop
from rollout.agents.multi_turn import MultiTurn
from rollout.environments.openenv import ActionSchema, InvalidActionError, OpenEnvError, Session, readable
from tests.support.chat_models import chat_tokenizer
from tests.support.environments import error_of, play_row, told
from tests.support.harnesses import FAMILY
from tests.support.openenv_server import OPENENV_PYTHON, server
from tests.support.real_clock import on_real_clock
from tests.support.sequences import only

REAL = pytest.param(
    "openenv",
    marks=pytest.mark.skipif(
        OPENENV_PYTHON is None, reason="OPENENV_PYTHON names no python with the package openenv (or openenv-core)"
    ),
)
both = pytest.fixture(scope="module", params=["documented", REAL])


@both
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with server(request.param) as url:
        yield url


@pytest.fixture(params=["documented", REAL])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def loop_of(url: str, **args: Any) -> MultiTurn:
    """Make the loop as rollout.agent_args does."""
    args = {"url": url, **args}
    loop = load_agent_loop("rollout.environments.openenv:agent_loop", chat_tokenizer(FAMILY), args)
    assert isinstance(loop, MultiTurn)
    return loop


def test_an_episode_is_a_session_with_the_seed_of_its_prompt(url: str) -> None:
    loop = loop_of(url, reset={"level": "two"}, state_metrics=["step_count"])
    episode = play_row(loop, ["It is 3.", "It is 7."], ordinal=17)
    assert told(episode) == "\nGuess a number at level two.\n\nWrong.\n"
    assert [turn.reward for turn in only(episode).turn_rewards] == [0.25, 1.0]
    assert episode.result is not None and (episode.result.reward, episode.result.error) == (1.25, None)
    assert episode.metrics["step_count"] == 2 and episode.metrics["invalid_actions"] == 0


def test_a_column_of_the_row_reaches_the_reset(url: str) -> None:
    assert "level nine" in told(play_row(loop_of(url, columns=["level"]), ["0"], level="nine"))
    loop = loop_of(url, columns=["levle"])
    assert "rollout.agent_args.columns=['levle']: the row has level" in error_of(play_row(loop, [], level="nine"))


def test_observations_are_messages_with_a_chat(url: str) -> None:
    episode = play_row(loop_of(url, chat=True), ["3", "7"], ordinal=7)
    assert told(episode) == (
        "user\nGuess a number at level one.<|im_end|>\n<|im_start|>assistant\n"
        "\n<|im_start|>user\nWrong.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_is_no_action_is_answered_with_a_hint_and_counted(url: str) -> None:
    episode = play_row(loop_of(url), ["A very long message indeed.", "7"], ordinal=7)
    assert "\nInvalid action: Invalid message: message: String should have at most 20 characters.\n" in told(episode)
    assert episode.metrics["invalid_actions"] == 1
    assert episode.result is not None and (episode.result.reward, episode.result.error) == (1.0, None)


def test_an_environment_that_fails_is_not_reward_0(url: str) -> None:
    error = error_of(play_row(loop_of(url), ["3", "boom"], ordinal=7))
    assert error.startswith("OpenEnvError") and "step failed: the sandbox is gone" in error


@pytest.mark.slow
def test_a_lost_connection_is_a_failed_episode(kind: str) -> None:
    with server(kind) as url:
        error = error_of(play_row(loop_of(url), ["3", "die"], ordinal=7))
    assert error.startswith("OpenEnvError") and "lost the connection in a step" in error


def test_no_server_is_a_failed_episode_and_the_error_names_the_key() -> None:
    assert "rollout.agent_args.url=http://127.0.0.1:9: has no /schema" in error_of(
        play_row(loop_of("http://127.0.0.1:9"), [])
    )


@pytest.mark.slow
@on_real_clock
async def test_an_episode_waits_for_a_session_and_closes_its_own(kind: str) -> None:
    """The server has one session, which another client holds for a while."""
    with server(kind, max_sessions=1) as url:
        session = await Session.open(url)
        await session.ask("reset", {})
        waiting = asyncio.create_task(asyncio.to_thread(play_row, loop_of(url), ["7"], ordinal=7))
        await asyncio.sleep(0.5)
        await session.close()
        first = await waiting
        second = await asyncio.to_thread(play_row, loop_of(url), ["7"], ordinal=7)  # in the session that it gave back
    for episode in (first, second):
        assert episode.result is not None and (episode.result.reward, episode.result.error) == (1.0, None)


@pytest.mark.slow
@on_real_clock
async def test_a_full_server_ends_the_reset_at_its_deadline(kind: str) -> None:
    with server(kind, max_sessions=1) as url:
        session = await Session.open(url)
        await session.ask("reset", {})
        episode = await asyncio.to_thread(play_row, loop_of(url, step_timeout_s=0.5), [])
        await session.close()
    assert error_of(episode).startswith("TimeoutError: a reset of the environment took longer")


@on_real_clock
async def test_a_message_that_the_server_does_not_know_is_an_error_with_its_code(url: str) -> None:
    session = await Session.open(url)
    with pytest.raises(OpenEnvError, match="Unknown message type") as caught:
        await session.ask("dance", {})
    assert caught.value.code == "UNKNOWN_TYPE"
    await session.close()


TEXT, COUNT = {"type": "string"}, {"anyOf": [{"type": "integer"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("properties", "required", "field", "text", "action"),
    [
        ({"message": TEXT, "metadata": {}}, [], None, "north", {"message": "north"}),
        ({"code": TEXT, "shell": TEXT}, ["code"], None, "1 + 1", {"code": "1 + 1"}),
        ({"code": TEXT, "shell": TEXT}, ["code"], "shell", "ls", {"shell": "ls"}),
        ({"place": COUNT}, ["place"], None, "From 2 I go to 14.", {"place": 14}),
        ({"angle": {"type": "number"}}, [], None, "Turn by -0.5", {"angle": -0.5}),
        ({"tokens": {"type": "array"}}, ["tokens"], None, "[1, 2]", {"tokens": [1, 2]}),
        ({"x": COUNT, "y": COUNT}, ["x", "y"], None, '{"x": 1, "y": 2}', {"x": 1, "y": 2}),
    ],
)
def test_a_text_becomes_an_action_by_the_schema(
    properties: Mapping[str, Any], required: list[str], field: str | None, text: str, action: Mapping[str, Any]
) -> None:
    assert ActionSchema({"properties": properties, "required": required}, field).read(text) == action


@pytest.mark.parametrize(
    ("properties", "text", "why"),
    [
        ({"place": COUNT}, "north", "an action has one integer"),
        ({"place": COUNT}, "9" * 5000, "an action is a shorter integer"),
        ({"x": COUNT, "y": COUNT}, "1, 2", "a JSON object with the keys x, y"),
        ({"x": COUNT, "y": COUNT}, "[1, 2]", "a JSON object with the keys x, y"),
        ({"x": COUNT, "y": COUNT}, "[" * 100_000, "a JSON object with the keys x, y"),
    ],
)
def test_a_text_that_is_no_action_says_what_one_is(properties: Mapping[str, Any], text: str, why: str) -> None:
    with pytest.raises(InvalidActionError, match=why):
        ActionSchema({"properties": properties}).read(text)


def test_a_field_that_an_action_has_not_is_no_fault_of_the_policy() -> None:
    with pytest.raises(ValueError, match=r"rollout\.agent_args\.field=text: an action of the server has message") as it:
        ActionSchema({"properties": {"message": TEXT}}, "text").read("north")
    assert not isinstance(it.value, InvalidActionError)


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"text": "You are here."}, "You are here."),
        ({"stdout": "4\n", "stderr": "", "exit_code": 0}, "4\n"),
        ({"stdout": "4", "stderr": "late", "exit_code": 0}, '{"stdout": "4", "stderr": "late", "exit_code": 0}'),
        ({"stdout": "4", "exit_code": 1}, '{"stdout": "4", "exit_code": 1}'),
    ],
)
def test_an_observation_is_its_only_text_or_else_json(observation: Mapping[str, Any], text: str) -> None:
    assert readable(observation) == text


def test_a_url_of_another_kind_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"rollout\.agent_args\.url=localhost:8000: must begin with http://"):
        loop_of("localhost:8000")
