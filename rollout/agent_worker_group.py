"""Agent workers in Ray actors, taken in turn."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError

from configs.schema import Config
from rollout.agent_loop import AgentLoop, GenerateGroup, load_agent_loop
from rollout.agent_worker import AgentWorker, EvaluationPart
from rollout.engines.base import EngineDiedError
from rollout.progress import FIRST, Attempt
from rollout.prompts import EncodedRow, Row
from rollout.replica_group import ENV, ReplicaHandle
from rollout.rewards.registry import load_reward
from rollout.router import ReplicaLostError
from rollout.types import Completion, GenerationRequest, Prompt, SamplingParams, TrajectoryGroup


class AgentWorkerActor(AgentWorker):
    """The edge: builds the worker's parts inside its process."""

    def __init__(
        self,
        *,
        config: Config,
        tokenizer_path: str,
        agent_loop: AgentLoop | None,
        replicas: dict[str, Any],
        on_start: Callable[[], None],
    ):
        on_start()
        from transformers import AutoTokenizer  # noqa: PLC0415  (imports torch; the driver does without)

        clients: dict[str, GenerateGroup] = {name: partial(_generate, name, actor) for name, actor in replicas.items()}
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
        super().__init__(
            config=config,
            tokenizer=tokenizer,
            loop=agent_loop or load_agent_loop(config.rollout.agent_loop, tokenizer),
            reward=load_reward(config.rollout),
            replicas=clients,
        )

    async def ready(self) -> None:
        """Returns once the constructor has."""

    async def connect(self, name: str, actor: Any) -> None:
        """From now on it can generate on this replica too."""
        self._replicas[name] = partial(_generate, name, actor)


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
        options: dict[str, Any] = {"num_cpus": 0.1, "max_concurrency": 8192, "runtime_env": {"env_vars": ENV}}
        remote_class = ray.remote(**options)(AgentWorkerActor)
        self.actors: list[Any] = [
            remote_class.remote(
                config=config,
                tokenizer_path=tokenizer_path,
                agent_loop=agent_loop,
                replicas={replica.name: replica.actor for replica in replicas},
                on_start=on_start(f"agent-worker-{index}"),
            )
            for index in range(config.rollout.num_agent_workers)
        ]
        self._turns = itertools.cycle(self.actors)

    async def ready(self) -> None:
        for actor in self.actors:
            await actor.ready.remote()

    async def connect(self, replica: ReplicaHandle) -> None:
        """Returns when every worker can generate on it."""
        await asyncio.gather(*(actor.connect.remote(replica.name, replica.actor) for actor in self.actors))

    async def encode(
        self, rows: Sequence[Row], template: str, chat_template: bool, max_tokens: int
    ) -> list[EncodedRow]:
        return await self.actors[0].encode.remote(list(rows), template, chat_template, max_tokens)

    async def run_group(
        self, prompt: Prompt, replica: str, sampling: SamplingParams, group_size: int, attempt: Attempt = FIRST
    ) -> TrajectoryGroup:
        call = next(self._turns).run_group.remote(prompt, replica, sampling, group_size, attempt)
        return await cancelled_with_us(call)

    async def evaluate(
        self, prompts: Sequence[Prompt], replica: str, sampling: SamplingParams, num_samples: int
    ) -> EvaluationPart:
        return await next(self._turns).evaluate.remote(list(prompts), replica, sampling, num_samples)

    def kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
