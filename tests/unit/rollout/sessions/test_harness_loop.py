"""Episodes of harnesses: the real SDKs and commands over HTTP, with a policy that says its lines."""

import asyncio
import contextlib
import json
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import psutil
import pytest

from configs.rollout import OnLimit
from configs.serve import TOKEN_ENV
from rollout.agents.loop import resume_from
from rollout.errors import ReplicaLostError
from rollout.progress import PartialCompletion, prompt_checksum
from rollout.rewards.base import RewardResult
from rollout.sessions.harness import SESSION_ENV, CommandHarness, Connection, HarnessError, HarnessTask, reward_of
from rollout.types import Completion, GenerationRequest, VersionSpan
from tests.support.episodes import episodes_of
from tests.support.harnesses import Policy, episode_task, harness_loop, run_one

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


def test_a_harness_over_the_openai_sdk_is_one_sequence_of_what_was_sampled() -> None:
    async def main() -> None:
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

    asyncio.run(main())


async def uses_anthropic(task: HarnessTask, connection: Connection) -> float:
    tool: Any = {"name": "calculator", "description": "Computes.", "input_schema": {"type": "object"}}
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    async with anthropic.AsyncAnthropic(base_url=connection.url, api_key=connection.key) as client:
        for _ in range(4):
            async with client.messages.stream(model="any", max_tokens=200, messages=messages, tools=[tool]) as stream:
                answer = await stream.get_final_message()
            messages.append({"role": "assistant", "content": [part.model_dump() for part in answer.content]})
            calls = [part for part in answer.content if part.type == "tool_use"]
            if not calls:
                return 1.0
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "42"} for call in calls]
            messages.append({"role": "user", "content": results})
    return 0.0


def test_a_harness_over_the_anthropic_sdk_streams_and_is_one_sequence_too() -> None:
    async def main() -> None:
        policy = Policy(calls_then_answers)
        episode = await run_one(Function(uses_anthropic), policy)
        assert len(episode.sequences) == 1 and episode.result == RewardResult(reward=1.0)
        assert episode.sequences[0].loss_mask.sum() == sum(one.num_tokens for one in policy.sampled.values())

    asyncio.run(main())


def test_versions_change_between_turns_and_no_token_notices() -> None:
    async def main() -> None:
        policy = Policy(calls_then_answers)

        async def with_an_update(task: HarnessTask, connection: Connection) -> float:
            policy.version = 3
            return await uses_the_calculator(task, connection)

        def say(text: str, request: GenerationRequest) -> str:
            policy.version += 1
            return calls_then_answers(text, request)

        policy._say = say
        (sequence,) = (await run_one(Function(with_an_update), policy)).sequences
        versions = sequence.token_versions()
        assert sorted(set(versions[sequence.loss_mask].tolist())) == [4, 5]
        assert set(versions[~sequence.loss_mask].tolist()) == {-1}
        assert sequence.spans[0] == VersionSpan(0, policy.sampled[0].num_tokens, 4)

    asyncio.run(main())


def test_sub_agents_side_by_side_are_sequences_of_their_own_and_share_the_reward() -> None:
    async def main() -> None:
        async def parent(task: HarnessTask, connection: Connection) -> float:
            async with client_of(connection) as client:

                async def ask(text: str) -> str:
                    messages: list[Any] = [{"role": "user", "content": text}]
                    for _ in range(2):
                        answer = await client.chat.completions.create(model="any", messages=messages)
                        content = answer.choices[0].message.content or ""
                        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "More."}]
                    return content

                await asyncio.gather(*(ask(f"Part {index}") for index in range(3)))
            return 0.5

        policy = Policy(lambda text, request: f"Said {request.request_id.turn}.")
        episode = await run_one(Function(parent), policy)
        assert len(episode.sequences) == 3
        assert sum(int(one.loss_mask.sum()) for one in episode.sequences) == sum(
            one.num_tokens for one in policy.sampled.values()
        )

    asyncio.run(main())


def test_a_harness_that_starts_again_hears_the_recorded_answers() -> None:
    """Also where its turns come in another order than before."""

    async def main() -> None:
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

    asyncio.run(main())


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
def test_a_limit_ends_by_length_first_and_then_by_403(
    on_limit: OnLimit, reward: float | None, is_trained: bool
) -> None:
    async def main() -> None:
        policy = Policy(lambda text, request: "Yes.")
        harness = Function(talks_for_ever)
        episode = await run_one(harness, policy, max_turns=3, on_limit=on_limit)
        assert len(policy.sampled) == 3 and episode.finish_reason == "length"
        assert episode.result == (None if reward is None else RewardResult(reward=reward)), (
            "None: rollout.reward scores it"
        )
        assert any(one.loss_mask.any() for one in episode.sequences) == is_trained

    asyncio.run(main())


def test_a_harness_at_its_deadline_is_ended_and_what_it_did_is_kept() -> None:
    async def main() -> None:
        async def hangs(task: HarnessTask, connection: Connection) -> float:
            await uses_the_calculator(task, connection)
            await asyncio.sleep(60)
            return 1.0

        policy = Policy(calls_then_answers)
        episode = await run_one(Function(hangs), policy, timeout_s=1.5)
        assert episode.finish_reason == "length" and episode.result is None, "rollout.reward scores it"
        assert len(episode.sequences) == 1

    asyncio.run(main())


def test_the_time_that_the_policy_takes_is_no_fault_of_the_harness() -> None:
    async def main() -> None:
        policy = Policy(calls_then_answers)
        policy.may_answer.clear()
        asyncio.get_running_loop().call_later(2.0, policy.may_answer.set)
        episode = await run_one(Function(uses_the_calculator), policy, timeout_s=1.0, idle_timeout_s=1.0)
        assert (episode.finish_reason, episode.result) == ("stop", RewardResult(reward=1.0))

    asyncio.run(main())


def test_a_client_that_goes_away_ends_its_generation_and_none_of_it_is_trained() -> None:
    async def main() -> None:
        policy = Policy(lambda text, request: "Late.")

        async def gives_up(task: HarnessTask, connection: Connection) -> float:
            policy.may_answer.clear()
            async with client_of(connection, max_retries=0, timeout=0.3) as client:
                with pytest.raises(openai.APITimeoutError):
                    await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hi"}])
                while policy.events != ["begin 0", "cancel 0"]:
                    await asyncio.sleep(0.01)
                policy.may_answer.set()
                await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Ho"}])
            return 1.0

        episode = await asyncio.wait_for(run_one(Function(gives_up), policy), 20)
        (sequence,) = episode.sequences
        assert sequence.loss_mask.sum() == policy.sampled[1].num_tokens

    asyncio.run(main())


async def asks_once(connection: Connection) -> str:
    """Returns the id of the answer."""
    async with client_of(connection, max_retries=0) as client:
        return (await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hi"}])).id


def test_what_fails_beneath_a_session_is_no_fault_of_its_harness() -> None:
    async def lost(requests: list[GenerationRequest]) -> list[Completion]:
        raise ReplicaLostError("replica-0 died")

    async def bears_it(task: HarnessTask, connection: Connection) -> float:
        with pytest.raises(openai.InternalServerError):
            await asks_once(connection)
        return 0.0

    async def main() -> None:
        async with harness_loop(Function(bears_it)) as loop:
            with pytest.raises(ReplicaLostError, match="replica-0 died"):
                await loop.run_episode(episode_task(), lost)

    asyncio.run(main())


def test_a_harness_that_cancels_itself_has_failed() -> None:
    async def gives_up(task: HarnessTask, connection: Connection) -> float:
        await asks_once(connection)
        raise asyncio.CancelledError

    episode = asyncio.run(run_one(Function(gives_up), Policy(lambda text, request: "Yes.")))
    assert episode.result is not None and "it has cancelled itself" in (episode.result.error or "")


@pytest.mark.parametrize(("on_limit", "reward", "turns"), [(OnLimit.train, 1.75, (0.75,)), (OnLimit.zero, 0.0, ())])
def test_rewards_of_turns_are_part_of_what_the_harness_returns(
    on_limit: OnLimit, reward: float, turns: tuple[float, ...]
) -> None:
    async def main() -> None:
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

    asyncio.run(main())


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


# -- commands ----------------------------------------------------------------------------------------------------------

AGENT = """
import json, os, sys
import openai
task = json.loads(sys.stdin.readline())
with openai.OpenAI() as client:
    answer = client.chat.completions.create(model="any", messages=[{"role": "user", "content": task["prompt"]}])
print("thinking")
print(json.dumps({"reward": float(task["ground_truth"] in answer.choices[0].message.content), "metrics": {"steps": 1}}))
"""


def command(tmp_path: Path, source: str) -> CommandHarness:
    (tmp_path / "agent.py").write_text(source)
    return CommandHarness(f"cd {tmp_path} && {sys.executable} agent.py")


def test_a_command_gets_its_task_and_session_and_its_last_line_is_the_reward(tmp_path: Path) -> None:
    async def main() -> None:
        policy = Policy(lambda text, request: "It is 42.")
        episode = await run_one(command(tmp_path, AGENT), policy)
        assert episode.result == RewardResult(reward=1.0, metrics={"steps": 1.0})
        assert len(episode.sequences) == 1

    asyncio.run(main())


def test_a_command_does_not_get_the_token_that_steers_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENV, "secret")
    monkeypatch.setenv("OF_THE_RUN", "1")
    source = f"{AGENT}\nprint(float(os.environ['OF_THE_RUN']) - float({TOKEN_ENV!r} in os.environ))"
    episode = asyncio.run(run_one(command(tmp_path, source), Policy(lambda text, request: "It is 42.")))
    assert episode.result == RewardResult(reward=1.0)


def test_a_command_that_fails_has_no_reward_and_says_why(tmp_path: Path) -> None:
    async def main() -> None:
        policy = Policy(lambda text, request: "It is 42.")
        episode = await run_one(command(tmp_path, "import sys; sys.exit('no sandbox left')"), policy)
        assert episode.result is not None and episode.result.error is not None
        assert "exit code 1" in episode.result.error and "no sandbox left" in episode.result.error

    asyncio.run(main())


LEAVES_CHILDREN = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "300"])
subprocess.Popen(["sleep", "301"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(302)
    os._exit(0)
time.sleep({seconds})
"""


def of_sessions_in(folder: Path) -> list[str]:
    """The command lines of processes that were started there, in a session."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if SESSION_ENV in process.environ() and process.cwd() == str(folder):
                found.append(" ".join(process.cmdline()))
    return found


@pytest.mark.parametrize("seconds", [0, 300])
def test_nothing_that_a_command_has_started_outlives_its_episode(tmp_path: Path, seconds: int) -> None:
    async def main() -> None:
        policy = Policy(lambda text, request: "It is 42.")
        harness = command(tmp_path, LEAVES_CHILDREN.replace("{seconds}", str(seconds)))
        episode = await run_one(harness, policy, timeout_s=2.0)
        assert episode.result is not None and "asked the policy for nothing" in (episode.result.error or "")
        for _ in range(50):
            if not of_sessions_in(tmp_path):
                return
            await asyncio.sleep(0.05)
        assert of_sessions_in(tmp_path) == []

    asyncio.run(main())


@pytest.mark.parametrize("returned", [None, 0.5])
def test_a_harness_that_asks_for_nothing_has_a_failed_reward(returned: float | None) -> None:
    async def idle(task: HarnessTask, connection: Connection) -> float | None:
        return returned

    episode = asyncio.run(run_one(Function(idle), Policy(calls_then_answers)))
    assert episode.sequences == () and episode.result is not None
    assert episode.result == RewardResult(reward=0.0, error="the harness has asked the policy for nothing")


def test_a_task_is_json_whatever_its_row_has() -> None:
    extra = {"ids": np.arange(2), "score": np.float32(0.5), "day": date(2026, 1, 2), "raw": b"\xff", "text": "\ud800"}
    task = HarnessTask(prompt="?", ground_truth="", ordinal=0, index=0, extra=extra)
    told = {"ids": [0, 1], "score": 0.5, "day": "2026-01-02", "raw": "_w==", "text": "\ud800"}
    assert json.loads(task.to_json())["extra"] == told
    with pytest.raises(HarnessError, match="column 'what' of the data cannot be said as JSON: .*object has"):
        replace(task, extra={"what": object()}).to_json()


def test_what_a_line_of_output_says_about_the_reward() -> None:
    assert reward_of("0.5") == RewardResult(reward=0.5)
    assert reward_of('{"reward": 1, "metrics": {"a": 2}}') == RewardResult(reward=1.0, metrics={"a": 2})
    assert [reward_of(line) for line in ("", "done", "true", "[1]", '{"reward": "1"}', '"0.5"')] == [None] * 6


def test_episodes_of_a_group_run_side_by_side_and_no_key_opens_the_session_of_another() -> None:
    async def main() -> None:
        connections: list[Connection] = []
        all_there = asyncio.Event()

        async def meets_the_others(task: HarnessTask, connection: Connection) -> float:
            connections.append(connection)
            if len(connections) == 3:
                all_there.set()
            await all_there.wait()
            other = next(one for one in connections if one is not connection)
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

    asyncio.run(main())
