"""Episodes of several turns: tokens, masks, versions and limits by hand; the calculator over a whole group."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.agents.environment import Step
from rollout.agents.loop import Episode, EpisodeTask, load_agent_loop
from rollout.agents.multi_turn import MultiTurn
from rollout.environments import calculator
from rollout.types import Completion, GenerationRequest, TurnReward, VersionSpan
from tests.support.characters import EOS, Characters
from tests.support.episodes import episodes_of, make_task
from tests.support.fakes import make_prompt, run_virtual, spans_of
from tests.support.routes import rows_of, some_routes
from tests.support.sequences import only


class Policy:
    """Says its lines turn by turn: `lines[episode][turn]` as (text, versions of its tokens with that of the EOS)."""

    def __init__(self, *lines: list[tuple[str, list[int]]]):
        self.calls: list[list[GenerationRequest]] = []
        self._lines = lines

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        self.calls.append(requests)
        return [self._say(request) for request in requests]

    def _say(self, request: GenerationRequest) -> Completion:
        episode, turn = request.request_id.in_group
        text, versions = self._lines[episode][turn]
        token_ids = np.array([*map(ord, text), EOS], np.int32)[: request.sampling.max_tokens]
        return Completion(
            token_ids=token_ids,
            logprobs=-np.arange(1, len(token_ids) + 1, dtype=np.float32),
            spans=spans_of(versions[: len(token_ids)]),
            finish_reason="stop" if token_ids[-1] == EOS else "length",
            cached_tokens=len(request.prompt_ids) - 1,
        )


class Script:
    """An environment that answers step by step, and writes down what it hears."""

    def __init__(self, *steps: Step):
        self.heard: list[str] = []
        self._steps = iter(steps)

    async def step(self, text: str) -> Step:
        self.heard.append(text)
        return next(self._steps)


def play(policy: Policy, *scripts: Script, tasks: list[EpisodeTask] | None = None, max_turns: int = 4) -> list[Episode]:
    waiting = iter(scripts)
    loop = MultiTurn(lambda prompt: next(waiting), Characters(), max_turns=max_turns)
    return run_virtual(episodes_of(loop, tasks or [make_task()], policy.generate))


def test_a_conversation_is_one_response() -> None:
    """The policy's tokens are trained; the environment's are not, and have no version."""
    policy = Policy([("ab", [4, 4, 5]), ("c", [5, 6])])
    script = Script(Step(observation="XY"), Step(done=True))
    (episode,) = play(policy, script)
    assert script.heard == ["ab", "c"]
    assert only(episode).response_ids.tolist() == [97, 98, EOS, ord("X"), ord("Y"), 99, EOS]
    assert only(episode).loss_mask.tolist() == [True] * 3 + [False] * 2 + [True] * 2
    assert only(episode).rollout_logprobs.tolist() == [-1, -2, -3, 0, 0, -1, -2]
    assert only(episode).spans == (
        VersionSpan(0, 2, 4),
        VersionSpan(2, 3, 5),
        VersionSpan(5, 6, 5),
        VersionSpan(6, 7, 6),
    )
    assert (episode.finish_reason, episode.cached_tokens, episode.result) == ("stop", 1 + 6, None)
    first, second = (call[0] for call in policy.calls)
    assert (first.prompt_ids, second.prompt_ids) == ((1, 2), (1, 2, 97, 98, EOS, ord("X"), ord("Y")))
    assert (first.sampling.max_tokens, second.sampling.max_tokens) == (40, 35)
    assert (str(first.request_id), str(second.request_id)) == ("17-0", "17-0-1")


class RoutedPolicy(Policy):
    """Says the experts of all inputs but those that are known, by their place in the conversation."""

    def _say(self, request: GenerationRequest) -> Completion:
        answer = super()._say(request)
        inputs = range(request.num_routed, len(request.prompt_ids) + answer.num_tokens - 1)
        return replace(answer, routes=some_routes(inputs))


def test_a_turn_brings_the_experts_of_what_is_new() -> None:
    policy = RoutedPolicy([("ab", [4, 4, 5]), ("c", [5, 6]), ("d", [6, 6])])
    (episode,) = play(policy, Script(Step(observation="XY"), Step(observation="Z"), Step(done=True)))
    assert rows_of(only(episode).routes) == list(range(len(only(episode).token_ids) - 1))
    assert [call[0].num_routed for call in policy.calls] == [0, 2 + 3 - 1, 2 + 3 + 2 + 2 - 1]


def test_every_turn_keeps_the_reward_it_got() -> None:
    policy = Policy([("ab", [1, 1, 1]), ("c", [1, 1]), ("d", [1, 1])])
    script = Script(Step(observation="XY", reward=0.5), Step(observation="Z"), Step(done=True, reward=-1.0))
    (episode,) = play(policy, script)
    assert only(episode).turn_rewards == (TurnReward(3, 0.5, 0), TurnReward(10, -1.0, 1))
    assert episode.result is not None and episode.result.reward == -0.5


@pytest.mark.parametrize(
    ("max_tokens", "response", "finish_reason"),
    [
        (2, "ab", "length"),  # the first turn is cut off, and the environment is not asked
        (3, "ab\0", "length"),  # no room for the observation
        (5, "ab\0", "length"),  # room for it, but not for an answer
        (6, "ab\0XYc", "length"),
        (7, "ab\0XYc\0", "stop"),
    ],
)
def test_the_limit_is_of_the_whole_response(max_tokens: int, response: str, finish_reason: str) -> None:
    policy = Policy([("ab", [4] * 3), ("c", [4] * 2)])
    script = Script(Step(observation="XY"), Step(done=True))
    (episode,) = play(policy, script, tasks=[make_task(max_tokens=max_tokens)])
    assert "".join(map(chr, only(episode).response_ids)) == response
    assert episode.finish_reason == finish_reason
    assert sum(span.end - span.start for span in only(episode).spans) == only(episode).loss_mask.sum()
    assert len(script.heard) == {2: 0, 7: 2}.get(max_tokens, 1)


def test_an_episode_out_of_turns_is_cut_off() -> None:
    policy = Policy([("a", [1, 1])] * 3)
    (episode,) = play(policy, Script(*[Step(observation="?")] * 3), max_turns=2)
    assert len(policy.calls) == 2
    assert "".join(map(chr, only(episode).response_ids)) == "a\0?a\0"
    assert episode.finish_reason == "length"


def test_every_turn_has_a_seed_of_its_own() -> None:
    policy = Policy([("a", [1, 1])] * 3, [("a", [1, 1])] * 3)
    scripts = [Script(Step(), Step(), Step(done=True)) for _ in range(2)]
    play(policy, *scripts, tasks=[make_task(0, seed=3), make_task(1, seed=4)])
    seeds = [request.sampling.seed for call in policy.calls for request in call]
    assert len(set(seeds)) == 6 and None not in seeds
    play(policy, Script(Step(done=True)))
    assert policy.calls[-1][0].sampling.seed is None


turns = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 3), st.lists(st.integers(0, 1), min_size=5, max_size=5)), min_size=1
)


@settings(max_examples=60, deadline=None)
@given(turns, st.integers(1, 30))
def test_spans_cover_what_was_sampled_in_ascending_versions(
    turns: list[tuple[int, int, list[int]]], max_tokens: int
) -> None:
    """Against a plain list with one version per token, -1 for those of an observation."""
    version, lines, steps, expected = 0, [], [], []
    for length, observation, updates in turns:
        versions = [version := version + update for update in updates[: length + 1]]
        lines.append(("p" * length, versions))
        steps.append(Step(observation="o" * observation))
        expected += versions + [-1] * observation
    (episode,) = play(Policy(lines), Script(*steps), tasks=[make_task(max_tokens=max_tokens)], max_turns=len(turns))
    num_tokens = len(only(episode).response_ids)
    assert num_tokens <= max_tokens
    by_token = np.full(num_tokens, -1)
    for span in only(episode).spans:
        by_token[span.start : span.end] = span.global_steps
    assert by_token.tolist() == expected[:num_tokens]
    sampled_by = [span.global_steps for span in only(episode).spans]
    assert sampled_by == sorted(sampled_by)
    is_observation = only(episode).response_ids == ord("o")
    assert np.array_equal(only(episode).loss_mask, ~is_observation)
    assert np.array_equal(only(episode).rollout_logprobs == 0, is_observation)


# -- the example, and by name ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turn", "observation"),
    [
        ("calc: 17 * 3", "\n= 51\n"),
        ("So calc: 4 - 9\n", "\n= -5\n"),
        ("calc:-2+2", "\n= 0\n"),
        ("calc: 2 + 2 is 4", None),
        ("#### 4", None),
        ("calc: 99999999999 * 1", None),
    ],
)
def test_the_calculator_answers_a_call_at_the_end_of_a_turn(turn: str, observation: str | None) -> None:
    step = asyncio.run(calculator.Calculator(make_prompt(0)).step(turn))
    assert step == (Step(done=True) if observation is None else Step(observation=observation))


def test_a_group_with_the_calculator() -> None:
    policy = Policy([("calc: 6 * 7", [1] * 12), ("#### 42", [2] * 8)], [("#### 41", [1] * 8)])
    loop = load_agent_loop("rollout.environments.calculator:agent_loop", Characters())
    worked, guessed = run_virtual(episodes_of(loop, [make_task(0), make_task(1)], policy.generate))
    assert Characters().decode(only(worked).response_ids, True) == "calc: 6 * 7\n= 42\n#### 42"
    assert int((~only(worked).loss_mask).sum()) == len("\n= 42\n")
    assert only(worked).spans == (VersionSpan(0, 12, 1), VersionSpan(18, 26, 2))
    assert Characters().decode(only(guessed).response_ids, True) == "#### 41"


@pytest.mark.parametrize("reward", ["1", [1.0], float("nan"), 10**400])
def test_a_step_whose_reward_is_no_number_fails_its_episode_and_no_other(reward: Any) -> None:
    policy = Policy([("ab", [1] * 3)], [("ab", [1] * 3)])
    wrong, right = Script(Step(done=True, reward=reward)), Script(Step(done=True, reward=1.0))
    tasks = [make_task(index=index) for index in range(2)]
    first, second = play(policy, wrong, right, tasks=tasks)
    assert first.result is not None and only(first).turn_rewards == ()
    assert "the reward of a step must be a finite number" in (first.result.error or "") or reward == 10**400
    assert first.result.error is not None and second.result is not None and second.result.reward == 1.0
