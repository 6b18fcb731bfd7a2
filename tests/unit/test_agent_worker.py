"""Prompts to tokens, episodes to trajectories, and rewards: on a made-up tokenizer and replicas."""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollout.agent_loop import SingleTurn
from rollout.agent_worker import AgentWorker
from rollout.prompts import Row
from rollout.rewards.base import Reward, RewardResult
from rollout.types import Completion, GenerationRequest, Prompt, SamplingParams, TrajectoryGroup, VersionSpan
from tests.fakes import make_prompt, run_virtual

EOS = 0
SAMPLING = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_tokens=8, seed=3)


class FakeTokenizer:
    """One token per character. Special tokens: 1 at the start where asked for, EOS is left out of decoded text."""

    eos_token_id = EOS
    chat_template = "made up"

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        if not texts:
            raise IndexError("list index out of range")  # as the real ones do
        start = [1] if add_special_tokens else []
        return {"input_ids": [[*start, *map(ord, text)] for text in texts]}

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"

    def decode(self, token_ids: Any, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(token) for token in token_ids if token != EOS)


class FakeReplica:
    """Answers request i with the letters of `answers[i]` and an EOS, sampled by version 4 and then 5."""

    def __init__(self, *answers: str):
        self.calls: list[list[GenerationRequest]] = []
        self._answers = answers

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        self.calls.append(requests)
        return [self._complete(answer) for _, answer in zip(requests, self._answers, strict=True)]

    def _complete(self, answer: str) -> Completion:
        token_ids = np.array([*map(ord, answer), EOS], np.int32)
        return Completion(
            token_ids=token_ids,
            logprobs=-np.arange(len(token_ids), dtype=np.float32),
            spans=(VersionSpan(0, 1, 4), VersionSpan(1, len(token_ids), 5)),
            finish_reason="stop",
            cached_tokens=len(answer),
        )


def reward_of_length(prompt: Prompt, text: str) -> RewardResult:
    return RewardResult(reward=float(len(text)))


def make_worker(reward: Reward = reward_of_length, **replicas: FakeReplica) -> AgentWorker:
    clients = {name: replica.generate for name, replica in replicas.items()}
    return AgentWorker(tokenizer=FakeTokenizer(), loop=SingleTurn(), reward=reward, replicas=clients)


def run_group(worker: AgentWorker, ordinal: int = 17, sampling: SamplingParams = SAMPLING, size: int = 2) -> Any:
    return run_virtual(worker.run_group(make_prompt(ordinal), "r0", sampling, size))


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_the_question_goes_into_the_template_and_braces_are_only_text() -> None:
    rows = [Row(question="{x} + 1?", ground_truth="2", extra={"k": 1})]
    encoded = make_worker().encode(rows, "Q {question} {A}", chat_template=False, max_tokens=99)
    assert [row.text for row in encoded] == ["Q {x} + 1? {A}"]
    assert encoded[0].row == rows[0]
    assert encoded[0].token_ids == (1, *map(ord, "Q {x} + 1? {A}"))


def test_a_chat_template_wraps_the_prompt_and_brings_the_special_tokens_itself() -> None:
    [encoded] = make_worker().encode([Row(question="1?", ground_truth="")], "Q {question}", True, max_tokens=99)
    assert encoded.text == "<user>Q 1?<assistant>"
    assert encoded.token_ids == tuple(map(ord, encoded.text))


def test_prompts_over_the_limit_are_left_out() -> None:
    rows = [Row(question="q" * length, ground_truth="") for length in (3, 5, 4)]
    encoded = make_worker().encode(rows, "{question}", chat_template=False, max_tokens=5)
    assert [row.text for row in encoded] == ["qqq", "qqqq"]  # and one special token each


def test_no_rows_are_no_prompts() -> None:
    assert make_worker().encode([], "{question}", chat_template=False, max_tokens=5) == []


# -- groups ------------------------------------------------------------------------------------------------------------


def test_a_group_is_sampled_on_one_replica_and_scored() -> None:
    replicas = {"r0": FakeReplica("ab", "c"), "r1": FakeReplica()}
    group: TrajectoryGroup = run_group(make_worker(**replicas))
    assert [len(replica.calls) for replica in replicas.values()] == [1, 0]
    assert group.prompt == make_prompt(17)
    first, second = group.trajectories
    assert (first.text, first.reward, second.text, second.reward) == ("ab", 2.0, "c", 1.0)
    assert first.prompt_ids.tolist() == [1, 2]
    assert first.response_ids.tolist() == [97, 98, EOS]
    assert first.rollout_logprobs.tolist() == [0, -1, -2]
    assert first.loss_mask.all() and len(first.loss_mask) == 3
    assert first.spans == (VersionSpan(0, 1, 4), VersionSpan(1, 3, 5))
    assert (first.replica, first.finish_reason, first.cached_tokens) == ("r0", "stop", 2)


def requests_of(ordinal: int, size: int, sampling: SamplingParams = SAMPLING) -> list[GenerationRequest]:
    replica = FakeReplica(*"abcdefgh"[:size])
    run_group(make_worker(r0=replica), ordinal, sampling, size)
    return replica.calls[0]


def test_requests_carry_the_prompt_and_the_sampling_with_the_end_of_sequence_as_a_stop() -> None:
    for request in requests_of(17, 2, replace(SAMPLING, stop_token_ids=(9,))):
        assert request.prompt_ids == (1, 2)
        assert replace(request.sampling, seed=3) == replace(SAMPLING, stop_token_ids=(9, EOS))


def test_ignoring_the_end_of_sequence_does_not_stop_at_it() -> None:
    assert {r.sampling.stop_token_ids for r in requests_of(17, 2, replace(SAMPLING, ignore_eos=True))} == {()}


def test_request_ids_and_seeds_are_unique_over_all_trajectories_of_a_run() -> None:
    requests = [request for ordinal in range(200) for request in requests_of(ordinal, 8)]
    assert len({request.request_id for request in requests}) == 1600
    assert len({request.sampling.seed for request in requests}) == 1600
    assert all(request.sampling.seed in range(2**31) for request in requests)


def test_a_seed_depends_on_ordinal_index_and_the_runs_seed_alone() -> None:
    whole = [request.sampling.seed for request in requests_of(5, 8)]
    requests_of(4, 8)
    assert [request.sampling.seed for request in requests_of(5, 4)] == whole[:4]
    assert set(whole).isdisjoint(r.sampling.seed for r in requests_of(5, 8, replace(SAMPLING, seed=4)))


def test_without_a_seed_nothing_is_seeded() -> None:
    assert {r.sampling.seed for r in requests_of(5, 4, replace(SAMPLING, seed=None))} == {None}


# -- rewards -----------------------------------------------------------------------------------------------------------


def plain_float(prompt: Prompt, text: str) -> float:
    return 0.5


def plain_bool(prompt: Prompt, text: str) -> bool:
    return text == "ab"


async def async_result(prompt: Prompt, text: str) -> RewardResult:
    await asyncio.sleep(3600)
    return RewardResult(reward=2.5)


class AsyncCallable:
    """`inspect.iscoroutinefunction` says no."""

    async def __call__(self, prompt: Prompt, text: str) -> float:
        return 3.5


def returns_awaitable(prompt: Prompt, text: str) -> Awaitable[RewardResult]:
    return async_result(prompt, text)


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (plain_float, [0.5, 0.5]),
        (plain_bool, [1.0, 0.0]),
        (async_result, [2.5, 2.5]),
        (AsyncCallable(), [3.5, 3.5]),
        (returns_awaitable, [2.5, 2.5]),
    ],
)
def test_a_reward_may_be_a_number_a_result_or_either_of_them_later(reward: Reward, expected: list[float]) -> None:
    group = run_group(make_worker(reward, r0=FakeReplica("ab", "c")))
    assert [trajectory.reward for trajectory in group.trajectories] == expected
    assert {type(trajectory.reward) for trajectory in group.trajectories} == {float}


def test_async_rewards_of_a_group_run_side_by_side() -> None:
    async def main() -> float:
        await make_worker(async_result, r0=FakeReplica(*"abcd")).run_group(make_prompt(0), "r0", SAMPLING, 4)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(3600)


def test_a_reward_gets_the_prompt_and_the_decoded_response() -> None:
    seen = []

    def reward(prompt: Prompt, text: str) -> float:
        seen.append((prompt.ground_truth, text))
        return 0.0

    run_group(make_worker(reward, r0=FakeReplica("ab", "c")))
    assert seen == [("17", "ab"), ("17", "c")]


@pytest.mark.parametrize("is_evaluation", [False, True])
def test_a_reward_that_raises_is_not_swallowed(is_evaluation: bool) -> None:
    def reward(prompt: Prompt, text: str) -> float:
        raise ZeroDivisionError("in the reward")

    worker = make_worker(reward, r0=FakeReplica("ab"))
    call = worker.evaluate([make_prompt(0)], "r0", SAMPLING, 1) if is_evaluation else None
    with pytest.raises(ZeroDivisionError, match="in the reward"):
        run_virtual(call or worker.run_group(make_prompt(0), "r0", SAMPLING, 1))


# -- evaluation --------------------------------------------------------------------------------------------------------


def reward_of_letters(prompt: Prompt, text: str) -> RewardResult:
    return RewardResult(reward=-1.0, accuracy=float(len(text)), answer=prompt.ground_truth + text[:1])


def test_an_evaluation_answers_in_the_order_of_its_prompts_and_samples() -> None:
    replica = FakeReplica("a", "abcd", "ab", "", "b", "abc")
    prompts = [make_prompt(ordinal) for ordinal in (5, 3, 4)]
    sampling = SamplingParams(temperature=0.6, max_tokens=8)
    part = run_virtual(make_worker(reward_of_letters, r0=replica).evaluate(prompts, "r0", sampling, 2))
    scores = [[(sample.accuracy, sample.answer, sample.num_tokens) for sample in some] for some in part.samples]
    assert scores == [[(1, "5a", 2), (4, "5a", 5)], [(2, "3a", 3), (0, "3", 1)], [(1, "4b", 2), (3, "4a", 4)]]
    assert part.versions == {4, 5}
    [requests] = replica.calls
    ids = ["eval-5-0", "eval-5-1", "eval-3-0", "eval-3-1", "eval-4-0", "eval-4-1"]
    assert [request.request_id for request in requests] == ids
    assert {request.sampling for request in requests} == {replace(sampling, stop_token_ids=(EOS,))}


def test_a_reward_that_tells_no_accuracy_is_the_accuracy() -> None:
    part = run_virtual(make_worker(r0=FakeReplica("abc")).evaluate([make_prompt(5)], "r0", SAMPLING, 1))
    [[sample]] = part.samples
    assert (sample.accuracy, sample.answer) == (3.0, None)


def test_samples_of_an_evaluation_have_seeds_of_their_own() -> None:
    replica = FakeReplica("a", "b")
    run_virtual(make_worker(r0=replica).evaluate([make_prompt(5)], "r0", SAMPLING, 2))
    assert len({request.sampling.seed for request in replica.calls[0]}) == 2
