"""Sessions that rollout.reward scores: it reads what the policy said, and neither tools nor the harness."""

import json
from typing import Any

import openai

from configs.schema import Config, RolloutConfig
from rollout.agents.worker import AgentWorker
from rollout.rewards.base import RewardResult
from rollout.types import GenerationRequest, Prompt, SamplingParams
from tests.support.harnesses import ClientHarness, Policy, episode_task, harness_loop
from tests.support.real_clock import on_real_clock
from tests.support.rewards import threaded

CALL = '<tool_call>\n{"name": "run_tests", "arguments": {}}\n</tool_call>'
TOOL: Any = {"type": "function", "function": {"name": "run_tests", "parameters": {"type": "object"}}}
RESULT = "the tests say: #### 42"


async def agent(task: Any, client: openai.AsyncOpenAI) -> None:
    """Run a tool once, and post no reward."""
    messages: list[Any] = [{"role": "user", "content": f"{task.prompt} Answer: 42"}]
    said = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
    call = said.choices[0].message.tool_calls[0]  # pyright: ignore
    assert json.loads(call.function.arguments) == {}  # pyright: ignore
    messages += [said.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])


def does_not_know(text: str, request: GenerationRequest) -> str:
    return "I do not know." if "<tool_response>" in text else CALL


def worker_of(loop: Any, policy: Policy, scorer: Any) -> AgentWorker:
    config = Config(rollout=RolloutConfig(max_response_tokens=1000))
    return AgentWorker(
        config=config, tokenizer=policy.tokenizer, loop=loop, scorer=scorer, replicas={"r0": policy.generate}
    )


async def echo(prompt: Prompt, text: str) -> RewardResult:
    return RewardResult(reward=1.0, answer=text)


@on_real_clock
async def test_a_reward_reads_the_calls_and_the_answers_in_order() -> None:
    policy, sampling = Policy(does_not_know), SamplingParams(max_tokens=1000)
    async with harness_loop(ClientHarness(agent)) as loop:
        worker = worker_of(loop, policy, threaded(echo))
        [evaluated] = await worker.evaluate([episode_task().prompt], "r0", sampling, 1)
    assert evaluated.samples[0].answer == f"{CALL}\nI do not know."
