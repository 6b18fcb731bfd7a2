"""The part of verifiers.v1 (0.4) that rollout.environments.verifiers_v1 uses, where it is not installed. Its only
taskset is that of tests/support/plugins/looks_again.py."""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from openai import AsyncOpenAI
from pydantic import BaseModel


class Data(BaseModel):
    prompt: str
    answer: str
    kind: str

    @property
    def prompt_text(self) -> str:
        return self.prompt


class Task:
    def __init__(self, data: Data, config: Any):
        self.data = data

    @classmethod
    def data_type(cls) -> type[Data]:
        return Data


class Taskset:
    bounded = True

    def __init__(self, kind: str):
        self._kind = kind

    @classmethod
    def task_type(cls) -> type[Task]:
        return Task

    def __iter__(self) -> Iterator[Task]:
        for number in (6, 8):
            yield Task(Data(prompt=f"{number} times 7?", answer=str(7 * number), kind=self._kind), None)


class Env:
    def __init__(self, config: Any):
        self.taskset = Taskset(config.taskset.kind)
        self._is_served = False

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        self._is_served = True
        yield
        self._is_served = False

    async def run_episode(self, task: Task, context: SimpleNamespace) -> SimpleNamespace:
        assert self._is_served
        if task.data.kind == "broken":
            gone = SimpleNamespace(type="HarnessError", message="the sandbox is gone")
            return SimpleNamespace(ok=False, errors=[], traces=[SimpleNamespace(errors=[gone])])
        endpoint, messages, said = context.client, [{"role": "user", "content": task.data.prompt}], ""
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=os.environ[endpoint.api_key_var]) as client:
            for _ in range(2):
                asked: Any = messages
                answer = await client.chat.completions.create(model=context.model, messages=asked)
                said = answer.choices[0].message.content or ""
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Look again."}]
        if task.data.kind == "judged":
            down = SimpleNamespace(type="TaskError", message="no judge answers")
            return SimpleNamespace(ok=False, errors=[], traces=[SimpleNamespace(errors=[down])])
        score = float(task.data.answer in said)
        trace = SimpleNamespace(
            errors=[],
            rewards={"right": SimpleNamespace(score=score, weight=1.0)},
            metrics={"num_turns": 2.0, "skipped": None},
            reward=score,
        )
        return SimpleNamespace(ok=True, errors=[], traces=[trace])


__version__ = "0.4.0"
EvalClientConfig = ModelContext = SimpleNamespace
load_environment = Env


def resolve_env_config(data: dict[str, Any]) -> SimpleNamespace:
    if data["taskset"]["id"] != "looks-again":
        raise ModuleNotFoundError(f"taskset {data['taskset']['id']!r} not found")
    taskset = SimpleNamespace(kind=data["taskset"].get("kind", "right"), task=None)
    runtime = SimpleNamespace(**data["agent"]["runtime"])
    return SimpleNamespace(taskset=taskset, agent=SimpleNamespace(runtime=runtime))
