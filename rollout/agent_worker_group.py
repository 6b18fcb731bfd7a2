"""Agent workers in Ray actors, taken in turn."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from configs.deadline import within
from configs.schema import Config
from rollout.agent_loop import AgentLoop, load_agent_loop
from rollout.agent_worker import AgentWorker, EvaluationPart
from rollout.engines.base import EngineDiedError
from rollout.progress import FIRST, Attempt
from rollout.prompts import EncodedRow, Row
from rollout.replica_group import ENV, ReplicaHandle
from rollout.rewards.registry import load_reward
from rollout.router import AgentWorkerLostError, ReplicaLostError
from rollout.types import Completion, GenerationRequest, Prompt, SamplingParams, TrajectoryGroup

RETRY_S = 0.5
MAX_RESTARTS = 8
"""Of one agent worker. One that dies again and again has an agent loop or a reward that kills it."""


class AgentWorkerActor(AgentWorker):
    """The edge: builds the worker's parts inside its process. It knows no replica by itself, so that one which Ray has
    started again is as good as the one that died."""

    def __init__(
        self, *, config: Config, tokenizer_path: str, agent_loop: AgentLoop | None, on_start: Callable[[], None]
    ):
        on_start()
        from transformers import AutoTokenizer  # noqa: PLC0415  (imports torch; the driver does without)

        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
        super().__init__(
            config=config,
            tokenizer=tokenizer,
            loop=agent_loop or load_agent_loop(config.rollout.agent_loop, tokenizer),
            reward=load_reward(config.rollout),
            replicas={},
        )

    async def call_on(self, replica: Any, method: str, *args: Any) -> Any:
        """A method of AgentWorker, whose second argument is the name of this replica."""
        self.connect(args[1], partial(_generate, args[1], replica))
        return await getattr(self, method)(*args)

    async def ready(self) -> None:
        """Returns once the constructor has."""


async def _generate(name: str, actor: Any, requests: list[GenerationRequest]) -> list[Completion]:
    try:
        return await cancelled_with_us(actor.generate_group.remote(requests))
    except (RayActorError, EngineDiedError) as error:
        raise ReplicaLostError(f"{name} died while it generated: {error}") from error


async def cancelled_with_us(call: Any) -> Any:
    """Whoever gives up waiting for an actor's answer ends the work on it too."""
    try:
        return await call
    except asyncio.CancelledError:
        ray.cancel(call)
        raise


class AgentWorkerGroup:
    """The driver's side: a `rollout.rollouter.GroupRunner`."""

    def __init__(
        self,
        *,
        config: Config,
        tokenizer_path: str,
        replicas: list[ReplicaHandle],
        on_start: Callable[[str], Callable[[], None]],
        agent_loop: AgentLoop | None = None,
    ):
        """`agent_loop`: sent to every worker, in place of rollout.agent_loop."""
        options: dict[str, Any] = {
            "num_cpus": 0.1,
            "max_concurrency": 8192,
            "max_restarts": MAX_RESTARTS,
            "runtime_env": {"env_vars": ENV},
        }
        remote_class = ray.remote(**options)(AgentWorkerActor)
        self.actors: list[Any] = [
            remote_class.remote(
                config=config,
                tokenizer_path=tokenizer_path,
                agent_loop=agent_loop,
                on_start=on_start(f"agent-worker-{index}"),
            )
            for index in range(config.rollout.num_agent_workers)
        ]
        self._turns = itertools.cycle(self.actors)
        self._start_timeout_s = config.rollout.start_timeout_s
        self._replicas = {replica.name: replica.actor for replica in replicas}

    async def ready(self) -> None:
        for actor in self.actors:
            await actor.ready.remote()

    def connect(self, replica: ReplicaHandle) -> None:
        """From now on the workers can generate on it too."""
        self._replicas[replica.name] = replica.actor

    async def encode(
        self, rows: Sequence[Row], template: str, chat_template: bool, max_tokens: int
    ) -> list[EncodedRow]:
        return await self.actors[0].encode.remote(list(rows), template, chat_template, max_tokens)

    async def run_group(
        self, prompt: Prompt, replica: str, sampling: SamplingParams, group_size: int, attempt: Attempt = FIRST
    ) -> TrajectoryGroup:
        return await self._call("run_group", prompt, replica, sampling, group_size, attempt)

    async def evaluate(
        self, prompts: Sequence[Prompt], replica: str, sampling: SamplingParams, num_samples: int
    ) -> EvaluationPart:
        arguments = (list(prompts), replica, sampling, num_samples)
        try:
            return await self._call("evaluate", *arguments)
        except AgentWorkerLostError:
            return await self._call("evaluate", *arguments)

    async def _call(self, method: str, *args: Any) -> Any:
        """Raises AgentWorkerLostError when the worker dies meanwhile, once it is back."""
        worker = next(self._turns)
        try:
            return await cancelled_with_us(worker.call_on.remote(self._replicas[args[1]], method, *args))
        except RayActorError as error:
            await self._until_back(worker)
            raise AgentWorkerLostError(f"an agent worker died: {error}") from error

    async def _until_back(self, worker: Any) -> None:
        """Raises RayActorError when it has died for good, TimeoutError past the deadline."""
        async with within(self._start_timeout_s, "rollout.start_timeout_s", "starting an agent worker again"):
            while True:
                try:
                    return await worker.ready.remote()
                except ActorUnavailableError:
                    await asyncio.sleep(RETRY_S)

    def kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
