"""Agent workers in Ray actors, which take turns."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from configs.runtime.deadline import within
from configs.schema import Config
from rollout.actor_group import ENV, ReplicaClient, cancelled_with_us, placed
from rollout.agents.encoding import encode
from rollout.agents.loop import AgentLoop, load_agent_loop
from rollout.agents.worker import AgentWorker
from rollout.errors import AgentWorkerLostError
from rollout.evaluation.scores import EvaluatedPrompt
from rollout.progress import Attempt
from rollout.prompts import Row
from rollout.rewards.registry import load_reward
from rollout.types import Prompt, SamplingParams, TrajectoryGroup

logger = logging.getLogger(__name__)
W = TypeVar("W")


class AgentWorkerActor:
    """An agent worker in a process of its own. Each call brings the replica that it generates on."""

    def __init__(
        self, *, config: Config, tokenizer_path: str, agent_loop: AgentLoop | None, on_start: Callable[[], None]
    ):
        on_start()
        from transformers import AutoTokenizer  # imports torch, which the driver does without

        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
        self._worker = AgentWorker(
            config=config,
            tokenizer=tokenizer,
            loop=agent_loop or load_agent_loop(config.rollout.agent_loop, tokenizer),
            reward=load_reward(config.rollout),
            replicas={},
        )

    async def encode(self, rows: Sequence[Row], template: str, chat_template: bool, max_tokens: int) -> list[Prompt]:
        return encode(self._worker.tokenizer, rows, template, chat_template, max_tokens)

    async def run_group(
        self, prompt: Prompt, replica: ReplicaClient, sampling: SamplingParams, group_size: int, attempt: Attempt
    ) -> TrajectoryGroup:
        self._worker.replicas[replica.name] = replica.generate_group
        return await self._worker.run_group(prompt, replica.name, sampling, group_size, attempt)

    async def evaluate(
        self,
        prompts: Sequence[Prompt],
        replica: ReplicaClient,
        sampling: SamplingParams,
        num_samples: int,
        attempt: int,
    ) -> list[EvaluatedPrompt]:
        self._worker.replicas[replica.name] = replica.generate_group
        return await self._worker.evaluate(prompts, replica.name, sampling, num_samples, attempt=attempt)


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    name: str
    actor: Any
    """Ray's handle of an `AgentWorkerActor`."""

    async def result(self, call: Any) -> Any:
        """Return what the call to the actor returns. Raises AgentWorkerLostError when the process died."""
        try:
            return await cancelled_with_us(call)
        except RayTaskError:
            raise  # of the call itself: an actor that died then was the agent loop's own
        except RayActorError as error:
            raise AgentWorkerLostError(f"{self.name} died: {error}") from error


class AgentWorkerGroup:
    """The driver's side of all agent workers: a `GroupRunner` and an `EvaluationRunner`.

    Example:
        group = AgentWorkerGroup(config=config, tokenizer_path=path, replicas=clients, on_start=on_start)
        rows = await group.encode(rows, template, chat_template, max_tokens)
        trajectories = await group.run_group(prompt, "replica-3", sampling, 8, Attempt())
    """

    def __init__(
        self,
        *,
        config: Config,
        tokenizer_path: str,
        replicas: Iterable[ReplicaClient],
        on_start: Callable[[str], Callable[[], None]],
        agent_loop: AgentLoop | None = None,
    ):
        """`on_start(name)`: what a worker's process runs first. `agent_loop`: in place of rollout.agent_loop's."""
        options: dict[str, Any] = {"num_cpus": 0.1, "max_concurrency": 8192, "runtime_env": {"env_vars": ENV}}
        self._class = ray.remote(**options)(AgentWorkerActor)
        self._arguments = {"config": config, "tokenizer_path": tokenizer_path, "agent_loop": agent_loop}
        self._on_start = on_start
        self._start_timeout_s = config.rollout.start_timeout_s
        self._replicas = {replica.name: replica for replica in replicas}
        workers = [self._start(f"agent-worker-{index}") for index in range(config.rollout.num_agent_workers)]
        self._rotation = Rotation(workers, self._replace)

    def connect(self, replica: ReplicaClient) -> None:
        self._replicas[replica.name] = replica

    async def encode(self, rows: Sequence[Row], template: str, chat_template: bool, max_tokens: int) -> list[Prompt]:
        worker = await self._rotation.next()
        return await worker.actor.encode.remote(rows, template, chat_template, max_tokens)

    async def run_group(
        self, prompt: Prompt, replica: str, sampling: SamplingParams, group_size: int, attempt: Attempt
    ) -> TrajectoryGroup:
        arguments = (prompt, self._replicas[replica], sampling, group_size, attempt)
        if not attempt.alone:
            return await self._in_turn(lambda actor: actor.run_group.remote(*arguments))
        worker = self._start(f"agent-worker-of-prompt-{prompt.ordinal}")
        try:
            return await worker.result(worker.actor.run_group.remote(*arguments))
        finally:
            ray.kill(worker.actor)

    async def evaluate(
        self, prompts: Sequence[Prompt], replica: str, sampling: SamplingParams, num_samples: int, *, attempt: int = 0
    ) -> list[EvaluatedPrompt]:
        """Raises AgentWorkerLostError. The next call must have another `attempt`."""
        arguments = (prompts, self._replicas[replica], sampling, num_samples, attempt)
        return await self._in_turn(lambda actor: actor.evaluate.remote(*arguments))

    async def _in_turn(self, call: Callable[[Any], Any]) -> Any:
        worker = await self._rotation.next()
        try:
            return await worker.result(call(worker.actor))
        except AgentWorkerLostError:
            self._rotation.lose(worker)
            raise

    def _start(self, name: str) -> _Worker:
        return _Worker(name, self._class.remote(**self._arguments, on_start=self._on_start(name)))

    async def _replace(self, lost: _Worker) -> _Worker:
        """Start another in place of a lost one. Ray's own restart would send it calls before it has started."""
        ray.kill(lost.actor)  # it may have been out of reach only
        async with within(self._start_timeout_s, "rollout.start_timeout_s", f"starting {lost.name} again"):
            return await placed(
                lambda: self._start(lost.name),
                lambda worker: worker.actor.__ray_ready__.remote(),
                lambda worker: ray.kill(worker.actor),
                lambda text: logger.info("%s %s", lost.name, text),
            )


class NoWorkerLeftError(RuntimeError):
    """The last worker was lost, and none could be started in its place. The cause says why."""


class Rotation(Generic[W]):
    """Workers that take turns. A lost one is replaced, by `replace(lost)`, while the others continue."""

    def __init__(self, workers: Iterable[W], replace: Callable[[W], Awaitable[W]]):
        self._serving = deque(workers)
        self._replace = replace
        self._replacing: set[asyncio.Task[None]] = set()
        self._error: Exception | None = None

    async def next(self) -> W:
        """Waits until a worker serves. Raises NoWorkerLeftError."""
        while not self._serving:
            if not self._replacing:
                raise NoWorkerLeftError(f"no agent worker is left: {self._error}") from self._error
            await asyncio.wait(self._replacing, return_when=asyncio.FIRST_COMPLETED)
        self._serving.rotate(-1)
        return self._serving[-1]

    def lose(self, worker: W) -> None:
        """Replace the worker. Idempotent, since every call that it had in flight reports its loss."""
        if worker in self._serving:
            self._serving.remove(worker)
            task = asyncio.create_task(self._bring_another(worker))
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)

    async def _bring_another(self, lost: W) -> None:
        try:
            self._serving.append(await self._replace(lost))
        except Exception as error:
            logger.warning("an agent worker is not replaced", exc_info=error)
            self._error = error
