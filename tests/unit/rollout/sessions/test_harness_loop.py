"""Episodes of harnesses: the real SDKs and commands over HTTP, with a policy that says its lines."""

import asyncio
import contextlib
import json
import re
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from configs.rollout import OnLimit, OnMismatch
from configs.schema import Config
from rollout.agents.loop import resume_from
from rollout.errors import ReplicaLostError
from rollout.progress import PartialCompletion, prompt_checksum
from rollout.rewards.base import RewardResult
from rollout.sessions.harness import Connection, HarnessTask
from rollout.types import Completion, GenerationRequest
from tests.support.episodes import episodes_of, error_of
from tests.support.harnesses import Policy, episode_task, harness_loop, run_one
from tests.support.real_clock import on_real_clock

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>'
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def calls_then_answers(text: str, request: GenerationRequest) -> str:
    return "It is 42." if "<tool_response>" in text else CALL


class Function:
    """A harness that is a coroutine function of the task and its connection."""

    def __init__(self, function: Any):
        self._function = function

    async def run(self, task: HarnessTask, connection: Connection) -> object:
        return await self._function(task, connection)


def client_of(connection: Connection, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{connection.url}/v1", api_key=connection.key, **options)


async def uses_the_calculator(task: HarnessTask, connection: Connection) -> float:
    """Forty lines that anybody may have written."""
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    async with client_of(connection) as client:
        for _ in range(4):
            answer = await client.chat.completions.create(model="any", messages=messages, tools=[CALCULATOR])
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return float(task.ground_truth in (message.content or ""))
            for call in message.tool_calls:
                assert call.type == "function" and json.loads(call.function.arguments) == {"expression": "6 * 7"}
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "42"})
    return 0.0


@on_real_clock
async def test_a_harness_over_the_openai_sdk_is_one_sequence_of_what_was_sampled() -> None:
    policy = Policy(calls_then_answers)
    episode = await run_one(Function(uses_the_calculator), policy)
    (sequence,) = episode.sequences
    first, second = policy.sampled[0], policy.sampled[1]
    assert np.array_equal(sequence.response_ids[sequence.loss_mask], [*first.token_ids, *second.token_ids])
    assert np.array_equal(sequence.rollout_logprobs[sequence.loss_mask], [*first.logprobs, *second.logprobs])
    between = policy.tokenizer.decode(sequence.response_ids[~sequence.loss_mask])
    assert "<tool_response>\n42\n</tool_response>" in between and between.endswith("<|im_start|>assistant\n")
    assert policy.tokenizer.decode(sequence.prompt_ids).count("What is 6 times 7?") == 1
    assert [span.global_steps for span in sequence.spans] == [0, 0]
    assert (episode.finish_reason, episode.result) == ("stop", RewardResult(reward=1.0))


@on_real_clock
async def test_a_harness_that_starts_again_hears_the_recorded_answers() -> None:
    """Its turns come in another order than before."""
    before = Policy(calls_then_answers)
    first = await run_one(Function(uses_the_calculator), before)
    partials = {
        (0, 10 - turn): PartialCompletion(
            prompt_checksum=prompt_checksum(before.prompts[turn]), completion=before.sampled[turn]
        )
        for turn in before.sampled
    }
    after = Policy(calls_then_answers)
    async with harness_loop(Function(uses_the_calculator)) as loop:
        again = await loop.run_episode(episode_task(), resume_from(partials, after.generate))
    assert after.events == [] and again.result == first.result
    assert np.array_equal(again.sequences[0].token_ids, first.sequences[0].token_ids)


@pytest.mark.parametrize("on_mismatch", OnMismatch)
@on_real_clock
async def test_the_policy_reads_what_the_harness_sent_last_also_behind_ids_that_name_its_answers(
    on_mismatch: OnMismatch,
) -> None:
    """Instructions that state the present, a result that is cleared later, and an answer in other words."""

    async def states(task: HarnessTask, connection: Connection) -> float:
        messages: list[Any] = [{"role": "user", "content": task.prompt}]
        async with client_of(connection) as client:
            for turn in range(4):
                now: Any = [{"role": "system", "content": f"STATE-{turn}"}, *messages]
                answer = await client.chat.completions.create(model="any", messages=now, tools=[CALCULATOR])
                [call] = answer.choices[0].message.tool_calls or []
                messages.append(answer.choices[0].message.model_dump(exclude_none=True))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": f"RESULT-{turn}"})
                messages[2]["content"] = "[cleared]" if turn > 1 else "RESULT-0"
        return 1.0

    policy = Policy(lambda text, request: CALL)
    episode = await run_one(Function(states), policy, on_mismatch=on_mismatch)
    read = [policy.tokenizer.decode(policy.prompts[turn]) for turn in range(4)]
    assert [re.findall(r"STATE-\d|RESULT-\d|\[cleared\]", text) for text in read] == [
        ["STATE-0"],
        ["STATE-1", "RESULT-0"],
        ["STATE-2", "RESULT-0", "RESULT-1"],
        ["STATE-3", "[cleared]", "RESULT-1", "RESULT-2"],
    ]
    assert len(episode.sequences) == 4 and episode.metrics["forks_edit"] == 3
    assert episode.metrics["merged_fraction"] == 0.0
    assert episode.metrics["reread_tokens"] == sum(len(policy.prompts[turn]) for turn in range(1, 4))


@pytest.mark.parametrize(("on_mismatch", "num_sequences"), [(OnMismatch.fork, 3), (OnMismatch.bridge, 1)])
@on_real_clock
async def test_other_words_of_the_policy_are_passed_over_with_bridge_only(
    on_mismatch: OnMismatch, num_sequences: int
) -> None:
    async def rewords(task: HarnessTask, connection: Connection) -> float:
        messages: list[Any] = [{"role": "user", "content": task.prompt}]
        async with client_of(connection) as client:
            for turn in range(3):
                answer = await client.chat.completions.create(model="any", messages=messages, tools=[CALCULATOR])
                message = answer.choices[0].message.model_dump(exclude_none=True)
                messages += [{**message, "content": "I call:"}]
                messages.append({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": f"{turn}"})
        return 1.0

    episode = await run_one(Function(rewords), Policy(lambda text, request: CALL), on_mismatch=on_mismatch)
    assert len(episode.sequences) == num_sequences
    assert episode.metrics["bridged_edit" if num_sequences == 1 else "forks_edit"] == 2


# -- ends --------------------------------------------------------------------------------------------------------------


async def talks_for_ever(task: HarnessTask, connection: Connection) -> None:
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    async with client_of(connection, max_retries=0) as client:
        while True:
            answer = await client.chat.completions.create(model="any", messages=messages)
            content, reason = answer.choices[0].message.content or "", answer.choices[0].finish_reason
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": f"{reason}?"}]


@pytest.mark.parametrize(
    ("on_limit", "reward", "is_trained"),
    [(OnLimit.train, None, True), (OnLimit.zero, 0.0, True), (OnLimit.mask, None, False)],
)
@on_real_clock
async def test_a_limit_ends_by_length_first_and_then_by_403(
    on_limit: OnLimit, reward: float | None, is_trained: bool
) -> None:
    policy = Policy(lambda text, request: "Yes.")
    harness = Function(talks_for_ever)
    episode = await run_one(harness, policy, max_turns=3, on_limit=on_limit)
    assert len(policy.sampled) == 3 and episode.finish_reason == "length"
    assert episode.result == (None if reward is None else RewardResult(reward=reward)), "None: rollout.reward scores it"
    assert any(sequence.loss_mask.any() for sequence in episode.sequences) == is_trained


@on_real_clock
async def test_a_harness_at_its_deadline_is_ended_and_what_it_did_is_kept() -> None:
    async def hangs(task: HarnessTask, connection: Connection) -> float:
        await uses_the_calculator(task, connection)
        await asyncio.sleep(60)
        return 1.0

    policy = Policy(calls_then_answers)
    episode = await run_one(Function(hangs), policy, timeout_s=1.5)
    assert episode.finish_reason == "length" and episode.result is None, "rollout.reward scores it"
    assert len(episode.sequences) == 1


@pytest.mark.slow
@on_real_clock
async def test_a_harness_that_swallows_its_cancellation_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rollout.sessions.harness_loop.CANCEL_S", 0.2)
    may_end, outcomes = asyncio.Event(), list[str]()

    async def swallows(task: HarnessTask, connection: Connection) -> float:
        async with client_of(connection, max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": task.prompt}]
            await client.chat.completions.create(model="m", messages=messages)
            while not may_end.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await may_end.wait()
            try:
                await client.chat.completions.create(model="m", messages=messages)
            except openai.AuthenticationError as error:
                outcomes.append(str(error.code))
        return 1.0

    async with harness_loop(Function(swallows), timeout_s=3.0) as loop:
        try:
            async with asyncio.timeout(60):
                episode = await loop.run_episode(episode_task(), Policy(lambda *_: "hm").generate)
        finally:
            may_end.set()
        async with asyncio.timeout(60):
            while not outcomes:
                await asyncio.sleep(0.01)
    assert (episode.finish_reason, episode.result, len(episode.sequences)) == ("length", None, 1)
    assert "although it was cancelled: it is left" in caplog.text
    assert outcomes == ["invalid_api_key"], "its session has ended"


@on_real_clock
async def test_the_time_that_the_policy_takes_is_no_fault_of_the_harness() -> None:
    policy = Policy(calls_then_answers)
    policy.may_answer.clear()
    asyncio.get_running_loop().call_later(2.0, policy.may_answer.set)
    episode = await run_one(Function(uses_the_calculator), policy, timeout_s=1.0, idle_timeout_s=1.0)
    assert (episode.finish_reason, episode.result) == ("stop", RewardResult(reward=1.0))


async def asks_once(connection: Connection) -> str:
    """Returns the id of the answer."""
    async with client_of(connection, max_retries=0) as client:
        return (await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hi"}])).id


@on_real_clock
async def test_what_fails_beneath_a_session_is_no_fault_of_its_harness() -> None:
    async def lost(requests: list[GenerationRequest]) -> list[Completion]:
        raise ReplicaLostError("replica-0 died")

    async def bears_it(task: HarnessTask, connection: Connection) -> float:
        with pytest.raises(openai.InternalServerError):
            await asks_once(connection)
        return 0.0

    async with harness_loop(Function(bears_it)) as loop:
        with pytest.raises(ReplicaLostError, match="replica-0 died"):
            await loop.run_episode(episode_task(), lost)


def test_a_harness_that_cancels_itself_has_failed() -> None:
    async def gives_up(task: HarnessTask, connection: Connection) -> float:
        await asks_once(connection)
        raise asyncio.CancelledError

    episode = asyncio.run(run_one(Function(gives_up), Policy(lambda text, request: "Yes.")))
    assert "it has cancelled itself" in error_of(episode)


@pytest.mark.parametrize(("on_limit", "reward", "turns"), [(OnLimit.train, 1.75, (0.75,)), (OnLimit.zero, 0.0, ())])
@on_real_clock
async def test_rewards_of_turns_are_part_of_what_the_harness_returns(
    on_limit: OnLimit, reward: float, turns: tuple[float, ...]
) -> None:
    async def posts(task: HarnessTask, connection: Connection) -> float:
        posted = {"value": 0.75, "turn": await asks_once(connection)}
        await asks_once(connection)  # over the limit
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {connection.key}"}) as client:
            (await client.post(f"{connection.url}/reward", json=posted)).raise_for_status()
        return 1.0

    policy = Policy(lambda text, request: "Yes.")
    episode = await run_one(Function(posts), policy, max_turns=1, on_limit=on_limit)
    assert episode.result == RewardResult(reward=reward)
    assert tuple(turn.reward for turn in episode.sequences[0].turn_rewards) == turns


def test_stop_strings_of_the_run_hold_beside_those_of_a_request() -> None:
    seen: list[tuple[str, ...]] = []

    def say(text: str, request: GenerationRequest) -> str:
        seen.append(request.sampling.stop)
        return "Yes."

    async def main() -> None:
        async def asks(task: HarnessTask, connection: Connection) -> float:
            async with client_of(connection) as client:
                messages: Any = [{"role": "user", "content": "Hi"}]
                await client.chat.completions.create(model="any", messages=messages, stop=["#"])
            return 1.0

        task = episode_task()
        task = replace(task, sampling=replace(task.sampling, stop=("</answer>",)))
        async with harness_loop(Function(asks)) as loop:
            await loop.run_episode(task, Policy(say).generate)

    asyncio.run(main())
    assert seen == [("</answer>", "#")]


# -- episodes without a token ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("on_limit", OnLimit)
@pytest.mark.parametrize("returned", [None, 1.0, ValueError("I give up")])
@on_real_clock
async def test_an_episode_without_a_token_has_failed_and_names_the_refusal_or_the_limit(
    on_limit: OnLimit, returned: Any
) -> None:
    def asking(content: str, times: int, **options: Any) -> Function:
        async def asks(task: HarnessTask, connection: Connection) -> object:
            messages: Any = [{"role": "user", "content": content}]
            async with client_of(connection, max_retries=0) as client:
                for _ in range(times):
                    with contextlib.suppress(openai.APIStatusError):
                        await client.chat.completions.create(model="any", messages=messages, **options)
            if isinstance(returned, Exception):
                raise returned
            return returned

        return Function(asks)

    policy = Policy(lambda text, request: "Yes.")
    context = f"the context of {Config().data.max_prompt_tokens + 50} tokens (data.max_prompt_tokens + rollout.max_resp"
    for times in (1, 3):
        for content in ("word " * 2000, "word " * 2_000_000):
            episode = await run_one(asking(content, times), policy, max_tokens=50, on_limit=on_limit)
            error = error_of(episode)
            assert f"it has reached {context}" in error and "and the prompt has" in error, error
            assert (episode.sequences, episode.metrics["refused_requests"]) == ((), times - 1)
            assert ("the last of 2 requests that were refused: the session has reached" in error) == (times == 3)
        bad: Any = {"temperature": "hot"}
        episode = await run_one(asking("Hi", times, extra_body=bad), policy, on_limit=on_limit)
        error = error_of(episode)
        assert f"the last of {times} requests that were refused: temperature" in error, error
        assert episode.metrics["refused_requests"] == times
        assert ("I give up" in error) == isinstance(returned, Exception)
    assert policy.sampled == {}


@pytest.mark.parametrize("returned", [None, 0.5])
def test_a_harness_that_asks_for_nothing_has_a_failed_reward(returned: float | None) -> None:
    async def idle(task: HarnessTask, connection: Connection) -> float | None:
        return returned

    episode = asyncio.run(run_one(Function(idle), Policy(calls_then_answers)))
    assert episode.sequences == ()
    assert episode.result == RewardResult(reward=0.0, error="the harness has asked the policy for nothing")


@on_real_clock
async def test_episodes_of_a_group_run_side_by_side_and_no_key_opens_the_session_of_another() -> None:
    connections: list[Connection] = []
    all_there = asyncio.Event()

    async def meets_the_others(task: HarnessTask, connection: Connection) -> float:
        connections.append(connection)
        if len(connections) == 3:
            all_there.set()
        await all_there.wait()
        other = next(each for each in connections if each is not connection)
        stranger = openai.AsyncOpenAI(base_url=f"{other.url}/v1", api_key=connection.key, max_retries=0)
        async with stranger, client_of(connection) as client:
            with pytest.raises(openai.NotFoundError):
                await stranger.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hi"}])
            await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hi"}])
        return float(task.index)

    policy = Policy(lambda text, request: "Yes.")
    async with harness_loop(Function(meets_the_others)) as loop:
        episodes = await episodes_of(loop, [episode_task(index) for index in range(3)], policy.generate)
    assert [episode.result for episode in episodes] == [RewardResult(reward=float(index)) for index in range(3)]
