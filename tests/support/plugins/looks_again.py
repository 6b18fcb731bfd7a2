"""A taskset of verifiers 0.4 with a harness that runs in the process, as users write packages of them."""

from typing import Any

import verifiers.v1 as vf  # pyright: ignore
from openai import AsyncOpenAI


class Data(vf.TaskData):
    answer: str
    kind: str


class Task(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, task: Data, trace: vf.Trace) -> float:
        if task.kind == "judged":
            raise ConnectionError("no judge answers")
        return float(task.answer in trace.last_reply)

    @vf.metric
    async def num_turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Config(vf.TasksetConfig):
    kind: str = "right"
    """Or what goes wrong: judged, broken."""


class Taskset(vf.Taskset[Task, Config]):
    def load(self) -> Any:
        for number in (6, 8):
            prompt, answer = f"{number} times 7?", str(7 * number)
            yield Task(Data(prompt=prompt, answer=answer, kind=self.config.kind), self.config.task)


class HarnessConfig(vf.HarnessConfig):
    pass


class Harness(vf.Harness[HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        if data.kind == "broken":
            return vf.ProgramResult(exit_code=3, stdout="", stderr="the sandbox is gone")
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                said = answer.choices[0].message.content
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Look again."}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Taskset", "Harness"]
