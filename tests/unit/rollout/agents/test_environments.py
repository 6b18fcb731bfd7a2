"""An environment: what it may be, what is done for it (reset, close, threads, messages, limits), and what its failure
costs."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.agents.environment import Observation, Step, Turn
from rollout.agents.loop import Episode, EpisodeTask
from rollout.agents.multi_turn import MultiTurn
from rollout.chat.messages import Message, Role, ToolCall
from rollout.progress import Attempt
from rollout.types import Completion, GenerationRequest, SamplingParams, Trajectory
from tests.support.characters import EOS, Characters, Repeats
from tests.support.chats import FakeChat
from tests.support.episodes import episodes_of, error_of, make_task
from tests.support.fakes import make_prompt, now, run_virtual
from tests.support.rollouts import group_of
from tests.support.scenes import GROUP_SIZE, Scene
from tests.support.sequences import only

OWN = {"turns": 1.0, "cut_observations": 0.0, "failed_closes": 0.0}


class Recorded:
    """Notes what is called, in `events`."""

    def __init__(self, *steps: Step | BaseException, first: Observation = "", close_error: Exception | None = None):
        self.events: list[str] = []
        self._steps = iter(steps)
        self._first, self._close_error = first, close_error

    async def reset(self) -> Observation:
        self.events.append("reset")
        return self._first

    async def step(self, turn: Turn, /) -> Step:
        self.events.append(f"step {turn}")
        step = next(self._steps)
        if isinstance(step, BaseException):
            raise step
        return step

    async def close(self) -> None:
        self.events.append("close")
        await asyncio.sleep(1)
        if self._close_error is not None:
            raise self._close_error


def loop_of(environment: Any, **options: Any) -> MultiTurn:
    arguments: dict[str, Any] = {"max_turns": 3} | options
    return MultiTurn(lambda prompt: environment, Characters(), **arguments)


def play(
    environment: Any, policy: Repeats | None = None, episode_task: EpisodeTask | None = None, **options: Any
) -> Episode:
    loop = loop_of(environment, **options)
    run = run_virtual if loop.chat is None else asyncio.run  # a thread takes no virtual time
    episode = run(loop.run_episode(episode_task or make_task(), (policy or Repeats()).generate))
    return episode


def text_of(episode: Episode) -> str:
    return "".join(map(chr, only(episode).response_ids))


# -- reset and close ---------------------------------------------------------------------------------------------------


def test_the_first_observation_is_read_and_not_trained() -> None:
    environment, policy = Recorded(Step(done=True), first="XY"), Repeats()
    episode = play(environment, policy)
    assert environment.events == ["reset", "step ab", "close"]
    assert text_of(episode) == "XYab\0"
    assert only(episode).loss_mask.tolist() == [False, False, True, True, True]
    assert (only(episode).spans[0].start, only(episode).prompt_ids.tolist()) == (2, [1, 2])
    (request,) = policy.requests
    assert (request.prompt_ids, request.sampling.max_tokens) == ((1, 2, ord("X"), ord("Y")), 38)


async def test_an_environment_is_closed_when_its_episode_is_cancelled() -> None:
    environment = Recorded()

    async def never(requests: Sequence[GenerationRequest]) -> list[Completion]:
        await asyncio.sleep(1e6)
        return []

    running = asyncio.create_task(loop_of(environment).run_episode(make_task(), never))
    await asyncio.sleep(1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert environment.events == ["reset", "close"]


def test_an_environment_that_does_not_close_is_counted_and_keeps_its_reward() -> None:
    episode = play(Recorded(Step(done=True, reward=0.5), close_error=OSError("still busy")))
    assert episode.result is not None and (episode.result.reward, episode.result.error) == (0.5, None)
    assert episode.metrics == OWN | {"failed_closes": 1.0}


def test_an_environment_that_cannot_begin_leaves_its_episode_without_a_reward() -> None:
    class Broken(Recorded):
        async def reset(self) -> Observation:
            raise OSError("no world")

    environment, policy = Broken(), Repeats()
    episode = play(environment, policy)
    assert error_of(episode) == "OSError: no world"
    assert (episode.sequences, policy.requests, environment.events) == ((), [], ["close"])


def test_a_first_observation_without_room_for_an_answer_leaves_its_episode_without_a_reward() -> None:
    """The policy was not asked: a reward would be of something else."""
    policy = Repeats()
    episode = play(Recorded(first="XY"), policy, make_task(max_tokens=2))
    assert (episode.sequences, policy.requests) == ((), [])
    assert error_of(episode) == (
        "ValueError: the environment begins with 2 tokens, which leaves the policy none of "
        "rollout.max_response_tokens=2"
    )


# -- plain functions ---------------------------------------------------------------------------------------------------


class Blocking:
    """A plain class, whose methods block the thread they run in."""

    def __init__(self, seconds: float):
        self.threads: list[str] = []
        self._seconds = seconds

    def _block(self) -> None:
        self.threads.append(threading.current_thread().name)
        time.sleep(self._seconds)

    def reset(self) -> str:
        self._block()
        return "X"

    def step(self, text: str) -> Step:
        self._block()
        return Step(done=True, reward=1.0)

    def close(self) -> None:
        self._block()


def test_a_plain_environment_runs_in_threads_and_never_on_the_event_loop() -> None:
    environments = [Blocking(0.1) for _ in range(8)]
    waiting = iter(environments)
    loop = MultiTurn(lambda prompt: next(waiting), Characters(), max_turns=2)

    async def scenario() -> tuple[list[Episode], float]:
        longest, last = 0.0, time.monotonic()
        running = asyncio.create_task(episodes_of(loop, [make_task()] * 8, Repeats().generate))
        while not running.done():
            await asyncio.sleep(0.005)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        return running.result(), longest

    began = time.monotonic()
    episodes, longest = asyncio.run(scenario())
    assert [episode.result and episode.result.reward for episode in episodes] == [1.0] * 8
    assert time.monotonic() - began < 0.3 * 8, "all at once"
    assert longest < 0.3
    assert environments[0].threads == [f"a {method} of the environment" for method in ("reset", "step", "close")]


def test_a_plain_step_has_a_deadline() -> None:
    episode = asyncio.run(loop_of(Blocking(0.2), step_timeout_s=0.05).run_episode(make_task(), Repeats().generate))
    assert error_of(episode) == "TimeoutError: a reset of the environment took longer than step_timeout_s=0.05"


# -- turns and observations --------------------------------------------------------------------------------------------


def test_a_turn_has_its_tokens_and_what_a_parser_reads_in_it() -> None:
    heard: list[Turn] = []

    class Listens:
        async def step(self, turn: Turn, /) -> Step:
            heard.append(turn)
            return Step(done=True)

    call = ToolCall(call_id="call_0", name="add", arguments="{}")
    read: list[list[int]] = []

    def parse(token_ids: Sequence[int]) -> Message:
        read.append([*token_ids])
        return Message(role=Role.assistant, content="b", reasoning="a", tool_calls=(call,))

    play(Listens(), chat=FakeChat(read=parse))
    play(Listens())
    parsed, plain = heard
    assert parsed == plain == "ab" and parsed.token_ids.tolist() == [97, 98, EOS] == read[0]
    assert (parsed.content, parsed.reasoning, parsed.tool_calls) == ("b", "a", (call,))
    assert (plain.content, plain.reasoning, plain.tool_calls) == ("ab", None, None)


def says(*contents: str) -> list[Message]:
    return [Message(role=Role.user, content=content) for content in contents]


def render(token_ids: Sequence[int], turn: Turn | None, messages: Sequence[Message]) -> list[int] | None:
    """[content] for each. Cannot continue from a turn that says "no"."""
    if "no" in Characters().decode(token_ids, True):
        return None
    return [ord(letter) for message in messages for letter in f"[{message.content}]"]


def test_messages_are_rendered_after_all_that_came_before() -> None:
    policy = Repeats()
    seen: list[tuple[Sequence[int], Turn | None]] = []

    def noting(token_ids: Sequence[int], turn: Turn | None, messages: Sequence[Message]) -> list[int] | None:
        seen.append((token_ids, turn))
        return render(token_ids, turn, messages)

    chat = FakeChat(noting)
    episode = play(Recorded(Step(observation=says("x", "y")), Step(done=True), first=says("w")), policy, chat=chat)
    assert text_of(episode) == "[w]ab\0[x][y]ab\0"
    assert seen == [((1, 2), None), ((1, 2, *map(ord, "[w]ab\0")), "ab")]
    assert int(only(episode).loss_mask.sum()) == 6
    assert len(chat.threads) == 1 and threading.get_ident() not in chat.threads


@pytest.mark.parametrize(
    ("text", "options", "observation", "error"),
    [
        ("ab", {}, says("x"), "ValueError: the environment answers in messages, which needs MultiTurn(chat=...)"),
        ("no", {"chat": FakeChat(render)}, says("x"), "ValueError: the chat template cannot continue the episode"),
        (
            "ab",
            {"chat": FakeChat(render)},
            ["x"],
            "TypeError: an observation is a text or a sequence of Message, and not ['",
        ),
    ],
)
def test_what_cannot_be_rendered_is_an_error(text: str, options: Any, observation: Any, error: str) -> None:
    episode = play(Recorded(Step(observation=observation)), Repeats(text), **options)
    assert error_of(episode).startswith(error)


@pytest.mark.parametrize(
    ("observation", "response", "num_cut"),
    [
        ("wxyz", "ab\0wxyab\0", 1),
        ("wxy", "ab\0wxyab\0", 0),
        (says("wx", "yz"), "ab\0[wx][y]ab\0", 1),
        (says("wxyz", "abc"), "ab\0[wxy][]ab\0", 2),
    ],
)
def test_long_observations_are_cut_and_counted(observation: Observation, response: str, num_cut: int) -> None:
    environment = Recorded(Step(observation=observation), Step(done=True))
    episode = play(environment, max_observation_tokens=3, chat=FakeChat(render))
    assert (text_of(episode), episode.metrics["cut_observations"]) == (response, num_cut)


# -- limits and metrics ------------------------------------------------------------------------------------------------


def test_a_turn_has_a_cap_beside_that_of_the_response() -> None:
    policy = Repeats("a")
    environment = Recorded(Step(observation="XYZ"), Step(observation="XYZ"), Step(done=True))
    episode = play(environment, policy, make_task(max_tokens=12), max_turn_tokens=3)
    assert [request.sampling.max_tokens for request in policy.requests] == [3, 3, 2]
    assert (text_of(episode), episode.finish_reason) == ("a\0XYZa\0XYZa\0", "stop")
    cut = play(environment, Repeats("abc"), max_turn_tokens=3)
    assert (text_of(cut), cut.finish_reason, environment.events.count("step abc")) == ("abc", "length", 0)


def test_a_loop_adds_its_own_stop_strings() -> None:
    policy = Repeats()
    play(Recorded(Step(done=True)), policy, make_task(stop=("A",)), stop=("B",))
    assert policy.requests[0].sampling.stop == ("A", "B")


@pytest.mark.parametrize("name", ["max_turns", "max_turn_tokens", "max_observation_tokens"])
@pytest.mark.parametrize("value", [0, "ten"])
def test_a_limit_below_one_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}: must be a whole number, at least 1"):
        loop_of(None, **{name: value})


@pytest.mark.parametrize("value", [0, -1.5, "ten", None])
def test_a_step_has_a_deadline_above_0(value: Any) -> None:
    with pytest.raises(ValueError, match=f"step_timeout_s={value}: must be a number above 0"):
        loop_of(None, step_timeout_s=value)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=3))
def test_counts_are_summed_and_of_metrics_the_last_holds(values: list[tuple[int, int]]) -> None:
    steps = [Step(counts={"calls": count}, metrics={"distance": distance}) for count, distance in values]
    steps[-1] = replace(steps[-1], done=True)
    episode = play(Recorded(*steps))
    own = OWN | {"turns": float(len(values))}
    assert episode.metrics == own | {"calls": sum(count for count, _ in values), "distance": values[-1][1]}


@pytest.mark.parametrize(
    ("make_step", "error"),
    [
        (lambda: Step(counts={"turns": 1}), "ValueError: metric 'turns': is MultiTurn's own"),
        (lambda: Step(counts={"x": 1}, metrics={"x": 1}), "ValueError: metric 'x': is MultiTurn's own, or in both"),
        (lambda: Step(metrics={"x": float("nan")}), "ValueError: the metric x must be a finite number, not nan"),
        (lambda: "a text", "TypeError: a step of the environment returned 'a text', and not a Step"),
    ],
)
def test_a_step_that_is_none_leaves_its_episode_without_a_reward(make_step: Callable[[], Any], error: str) -> None:
    episode = play(Recorded(make_step()))
    assert error_of(episode).startswith(error)


def test_what_environments_share_is_closed_at_the_end_of_the_run_whatever_one_of_them_raises() -> None:
    events: list[str] = []

    async def fails() -> None:
        raise OSError("still busy")

    async def closes() -> None:
        await asyncio.sleep(1)
        events.append("closed")

    loop = loop_of(None, closes=(fails, closes))
    with pytest.raises(ExceptionGroup, match=r"1 of 2 could not be closed: \[OSError\('still busy'\)\]"):
        run_virtual(loop.close())
    assert events == ["closed"]


# -- environments that fail or hang ------------------------------------------------------------------------------------


TURN_TOKENS, TIMEOUT_S = 5, 60.0
FOREVER_S = 1e6


class World:
    """The environments of a group: two turns each. The first of them hangs, or fails, in one method."""

    def __init__(self, fails_in: str, error: Exception | None):
        self.fails_in, self.error = fails_in, error
        self.closed_at: list[float] = []
        self._num_made = 0

    def next(self, prompt: Any) -> "Environment":
        self._num_made += 1
        return Environment(self, is_bad=self._num_made == 1)


class Environment:
    def __init__(self, world: World, is_bad: bool):
        self._world, self._is_bad, self._turns = world, is_bad, 0

    async def _may_fail(self, method: str) -> None:
        if self._is_bad and method == self._world.fails_in:
            if self._world.error is not None:
                raise self._world.error
            await asyncio.sleep(FOREVER_S)

    async def reset(self) -> str:
        await self._may_fail("reset")
        return ""

    async def step(self, turn: Turn, /) -> Step:
        await self._may_fail("step")
        self._turns += 1
        return Step(done=self._turns == 2, reward=0.5, observation="?")

    async def close(self) -> None:
        self._world.closed_at.append(now())
        await self._may_fail("close")


def play_group(world: World) -> tuple[Trajectory, ...]:
    """A group, as an agent worker runs it. The engine has two seats, and a token takes a second."""

    async def main() -> tuple[Trajectory, ...]:
        loop = MultiTurn(world.next, Characters(), max_turns=3, max_turn_tokens=TURN_TOKENS, step_timeout_s=TIMEOUT_S)
        scene = Scene(num_replicas=1, loop=loop)
        await scene.manager.update_weights(0)
        sampling, attempt = SamplingParams(max_tokens=30), Attempt()
        group = await group_of(scene.worker.run_group(make_prompt(0), "replica-0", sampling, GROUP_SIZE, attempt))
        return group.trajectories

    return run_virtual(main())


@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError("no world"), "OSError: no world"),
        (None, "TimeoutError: a {} of the environment took longer than step_timeout_s=60.0"),
    ],
    ids=["fails", "hangs"],
)
def test_an_environment_that_fails_or_hangs_is_no_reward_of_zero(
    method: str, error: Exception | None, expected: str
) -> None:
    world = World(method, error)
    bad, *others = play_group(world)
    assert bad.error == expected.format(method) and not bad.is_scored
    assert [(trajectory.error, trajectory.reward, trajectory.is_scored) for trajectory in others] == [
        (None, 1.0, True)
    ] * 3
    *early, last = sorted(world.closed_at)
    assert len(early) == 3 and early[-1] < 40, "the others did not wait for it, and it is closed, too"
    assert last < TIMEOUT_S + 20, "it has its deadline"


def test_a_close_that_hangs_costs_no_other_episode_and_no_reward() -> None:
    world = World("close", None)
    trajectories = play_group(world)
    assert [(trajectory.error, trajectory.reward) for trajectory in trajectories] == [(None, 1.0)] * GROUP_SIZE
    assert [trajectory.agent_metrics["failed_closes"] for trajectory in trajectories] == [1.0, 0.0, 0.0, 0.0]
    assert max(world.closed_at) < 40
    assert {len(only(trajectory).response_ids) for trajectory in trajectories} == {2 * TURN_TOKENS + 1}
