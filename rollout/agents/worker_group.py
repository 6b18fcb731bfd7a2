"""Agent workers in Ray actors, taken in turn."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from configs.runtime.deadline import within
from configs.schema import Config
from rollout.agents.loop import AgentLoop, load_agent_loop
from rollout.agents.rotation import Rotation
from rollout.agents.worker import AgentWorker, EvaluationPart
from rollout.engines.base import EngineDiedError
from rollout.errors import AgentWorkerLostError, ReplicaLostError
from rollout.progress import FIRST, Attempt
from rollout.prompts import EncodedRow, Row
from rollout.replica.replica_group import ENV, ReplicaHandle, cancelled_with_us, generate_group, placed
from rollout.rewards.registry import load_reward
from rollout.types import Completion, GenerationRequest, Prompt, SamplingParams, TrajectoryGroup
from rollout.wire import PackedGroup, pack_group, unpack_group

logger = logging.getLogger(__name__)


class AgentWorkerActor(AgentWorker):
    """The edge: builds the worker's parts inside its process. It knows no replica by itself, so that one is as good as
    any other."""

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

    async def call_on(self, replica: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """A method of AgentWorker, whose second argument is the name of this replica."""
        self.connect(args[1], partial(_generate, args[1], replica))
        return await getattr(self, method)(*args, **kwargs)

    async def packed_group(self, *args: Any) -> PackedGroup:
        """`run_group`, as it travels."""
        return pack_group(await self.run_group(*args))

    async def ready(self) -> None:
        """Returns once the constructor has."""


async def _generate(name: str, actor: Any, requests: list[GenerationRequest]) -> list[Completion]:
    try:
        return await generate_group(actor, requests)
    except (RayActorError, EngineDiedError) as error:
        raise ReplicaLostError(f"{name} died while it generated: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    name: str
    actor: Any


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
        self._class = ray.remote(**options)(AgentWorkerActor)
        self._arguments = {"config": config, "tokenizer_path": tokenizer_path, "agent_loop": agent_loop}
        self._on_start = on_start
        self._start_timeout_s = config.rollout.start_timeout_s
        self._replicas = {replica.name: replica.actor for replica in replicas}
        workers = [self._start(f"agent-worker-{index}") for index in range(config.rollout.num_agent_workers)]
        self._rotation = Rotation(workers, self._replace)

    def _start(self, name: str) -> _Worker:
        return _Worker(name, self._class.remote(**self._arguments, on_start=self._on_start(name)))

    async def _replace(self, lost: _Worker) -> _Worker:
        """Not left to Ray, which would send calls to one that is still on its way."""
        ray.kill(lost.actor)  # where it was only out of reach
        async with within(self._start_timeout_s, "rollout.start_timeout_s", f"starting {lost.name} again"):
            return await placed(
                lambda: self._start(lost.name),
                lambda worker: worker.actor.ready.remote(),
                lambda worker: ray.kill(worker.actor),
                lambda text: logger.info("%s %s", lost.name, text),
            )

    async def ready(self) -> None:
        for worker in self._rotation.serving:
            await worker.actor.ready.remote()

    def connect(self, replica: ReplicaHandle) -> None:
        """From now on the workers can generate on it too."""
        self._replicas[replica.name] = replica.actor

    async def encode(
        self, rows: Sequence[Row], template: str, chat_template: bool, max_tokens: int
    ) -> list[EncodedRow]:
        worker = await self._rotation.next()
        return await worker.actor.encode.remote(list(rows), template, chat_template, max_tokens)

    async def run_group(
        self, prompt: Prompt, replica: str, sampling: SamplingParams, group_size: int, attempt: Attempt = FIRST
    ) -> TrajectoryGroup:
        arguments = (prompt, replica, sampling, group_size, attempt)
        if not attempt.alone:
            return unpack_group(await self._in_turn("packed_group", *arguments))
        worker = self._start(f"agent-worker-of-prompt-{prompt.ordinal}")
        try:
            return unpack_group(await self._call(worker, "packed_group", *arguments))
        finally:
            ray.kill(worker.actor)

    async def evaluate(
        self, prompts: Sequence[Prompt], replica: str, sampling: SamplingParams, num_samples: int, *, attempt: int = 0
    ) -> EvaluationPart:
        """Raises AgentWorkerLostError; the next call must have another `attempt`."""
        return await self._in_turn("evaluate", list(prompts), replica, sampling, num_samples, attempt=attempt)

    async def _in_turn(self, method: str, *args: Any, **kwargs: Any) -> Any:
        worker = await self._rotation.next()
        try:
            return await self._call(worker, method, *args, **kwargs)
        except AgentWorkerLostError:
            self._rotation.lose(worker)
            raise

    async def _call(self, worker: _Worker, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return await cancelled_with_us(
                worker.actor.call_on.remote(self._replicas[args[1]], method, *args, **kwargs)
            )
        except RayTaskError:
            raise  # of the method: if an actor died, then one of the agent loop's own
        except RayActorError as error:
            raise AgentWorkerLostError(f"{worker.name} died: {error}") from error
