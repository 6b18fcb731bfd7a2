"""An episode that runs again hears what its environment said the first time, whatever that says now."""

import asyncio
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.agents.environment import Observation, Step, Turn
from rollout.agents.loop import Episode
from rollout.agents.multi_turn import MultiTurn
from rollout.chat.messages import Message, Role
from rollout.progress import PartialCompletion, prompt_checksum
from rollout.request_ids import RequestId
from rollout.snapshot import capture, decode, encode, restore
from rollout.types import GenerationRequest, SamplingParams
from tests.support.characters import Characters, Repeats
from tests.support.chats import FakeChat
from tests.support.episodes import make_task
from tests.support.fakes import make_completion, run_virtual
from tests.support.scenes import GROUP_SIZE, Scene
from tests.support.sequences import only

TURN_TOKENS = 5
FIRST_FOUND = 100


@dataclass
class Index:
    """Finds something else at every lookup: a text of two letters."""

    found: list[str] = field(default_factory=list)
    _numbers: Any = field(default_factory=lambda: count(FIRST_FOUND))

    async def lookup(self) -> str:
        await asyncio.sleep(0.5)
        self.found.append(2 * chr(next(self._numbers)))
        return self.found[-1]


class Searches:
    """Two lookups, and then the answer."""

    def __init__(self, index: Index):
        self._index, self._steps = index, 0

    async def step(self, turn: Turn, /) -> Step:
        self._steps += 1
        if self._steps == 3:
            return Step(done=True, reward=1.0)
        return Step(observation="??" if turn.recorded is not None else await self._index.lookup())


def scene_of(index: Index) -> Scene:
    loop = MultiTurn(lambda prompt: Searches(index), Characters(), max_turns=3, max_turn_tokens=TURN_TOKENS)
    return Scene(num_replicas=1, loop=loop)


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(0, 140).map(lambda quarters: quarters / 4 + 0.1))
def test_cut_anywhere_a_resumed_run_looks_nothing_up_twice_and_samples_nothing_twice(cut: float) -> None:
    """Four episodes, two at a time, a token a second."""
    index = Index()

    async def first() -> tuple[bytes, int, int]:
        scene = scene_of(index)
        running = await scene.start()
        await scene.fleet.collect_progress()  # as the monitor does: from now on, ends are kept until it asks for them
        await asyncio.sleep(cut)
        await scene.fleet.collect_progress()
        state, heard = encode(capture(scene.rollouter)), len(index.found)
        sampled = scene.engines[0].usage.tokens
        running.cancel()
        return state, heard, sampled

    async def second(state: bytes, heard: int, sampled: int) -> None:
        del index.found[heard:]
        scene = scene_of(index)
        assert restore(decode(state), scene.rollouter) == 0
        running = await scene.start()
        group = await scene.group()
        assert sampled + scene.engines[0].usage.tokens == GROUP_SIZE * 3 * TURN_TOKENS
        sequences = [only(trajectory) for trajectory in group.trajectories]
        heard_by = [Characters().decode(sequence.response_ids[~sequence.loss_mask], True) for sequence in sequences]
        assert sorted(text[i : i + 2] for text in heard_by for i in (0, 2)) == sorted(index.found)
        assert [trajectory.reward for trajectory in group.trajectories] == [1.0] * GROUP_SIZE
        await running

    run_virtual(second(*run_virtual(first())))


@dataclass
class Says:
    """Says `observations` one after another, and hears `turns`."""

    observations: list[Observation]
    turns: list[Turn] = field(default_factory=list)

    async def reset(self) -> Observation:
        return self.observations[0]

    async def step(self, turn: Turn, /) -> Step:
        self.turns.append(turn)
        rest = self.observations[len(self.turns) :]
        return Step(observation=rest[0]) if rest else Step(done=True)


def play(says: Says, policy: Repeats, recorded: dict[int, PartialCompletion], chat: FakeChat | None = None) -> Episode:
    loop = MultiTurn(lambda prompt: says, Characters(), max_turns=4, chat=chat)
    return asyncio.run(loop.run_episode(make_task(recorded=recorded), policy.generate))


def recorded_in(policy: Repeats) -> dict[int, PartialCompletion]:
    """Return the observations as a replica reports them and a checkpoint keeps them."""
    return {
        request.request_id.turn: PartialCompletion(
            prompt_checksum=prompt_checksum(request.prompt_ids),
            completion=make_completion([], [], ""),
            observed=request.observed,
        )
        for request in policy.requests
    }


def observed_in(policy: Repeats) -> list[list[int]]:
    return [request.observed.tolist() for request in policy.requests if request.observed is not None]


def says_in_messages(*contents: str) -> list[Observation]:
    return [[Message(role=Role.user, content=content)] for content in contents]


CHAT = FakeChat(lambda ids, turn, messages: [ord(letter) for message in messages for letter in f"[{message.content}]"])


@pytest.mark.parametrize(
    ("first", "later", "chat", "heard"),
    [
        (["w", "", "yz"], ["W", "X", "Y"], None, ["", "yz", None]),
        (says_in_messages("w", "x"), says_in_messages("W", "X"), CHAT, ["[x]", None]),
    ],
    ids=["text", "messages"],
)
def test_the_policy_reads_what_was_recorded_and_the_environment_is_told(
    first: list[Observation], later: list[Observation], chat: FakeChat | None, heard: list[str | None]
) -> None:
    policy, again, says, now = Repeats(), Repeats(), Says(first), Says(later)
    expected = play(says, policy, {}, chat)
    episode = play(now, again, recorded_in(policy), chat)
    assert only(episode).response_ids.tolist() == only(expected).response_ids.tolist()
    assert only(episode).loss_mask.tolist() == only(expected).loss_mask.tolist()
    assert observed_in(again) == observed_in(policy)
    assert [turn.recorded for turn in says.turns] == [None] * len(first)
    assert [turn.recorded for turn in now.turns] == heard


@pytest.mark.parametrize(
    "spoil",
    [
        lambda partial: replace(partial, prompt_checksum=partial.prompt_checksum + 1),  # the turns before were others
        lambda partial: replace(partial, observed=None),  # of a checkpoint that has none
    ],
    ids=["other turns", "not recorded"],
)
def test_what_belongs_to_other_turns_is_not_heard(spoil: Any) -> None:
    policy, now = Repeats(), Says(["W", "X", "Y"])
    play(Says(["w", "x", "y"]), policy, {})
    recorded = recorded_in(policy) | {1: spoil(recorded_in(policy)[1])}
    episode = play(now, Repeats(), recorded)
    text = Characters().decode(only(episode).response_ids, True)
    assert text == "wabXabYab", "from there on it is another episode"
    assert [turn.recorded for turn in now.turns] == [None] * 3


def test_a_request_has_its_observation_without_the_turns_before() -> None:
    request = GenerationRequest(
        request_id=RequestId(ordinal=0), prompt_ids=(1, 2, 3), sampling=SamplingParams(), num_observed=2
    )
    assert request.observed is not None and np.array_equal(request.observed, [2, 3])
    assert (
        replace(request, num_observed=0).observed is not None and replace(request, num_observed=None).observed is None
    )
