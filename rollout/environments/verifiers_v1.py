"""Environments of verifiers 0.4 and later (verifiers.v1): a taskset with its harness, or an Env of its own."""

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rollout.environments.optional import RolloutError, optional, with_causes
from rollout.rewards.base import RewardResult
from rollout.sessions.harness import HarnessTask

LOCAL_RUNTIMES = ("subprocess", "docker", "podman", "apptainer")
"""The runtimes on this machine. From any other a harness reaches the session through a tunnel of Prime's, which needs
an account."""


class V1Environment:
    """An environment whose harness talks to the session through verifiers' own proxy, which keeps its trace."""

    def __init__(self, env: str, args: Mapping[str, Any]):
        """`args`: keys of its EnvConfig, such as {"taskset": {...}, "agent": {"harness": {"id": "null"}}}. Its agent
        runs on this machine (runtime subprocess), unless they say otherwise. Raises ValueError for one that cannot be
        loaded, or that has several agents."""
        self._name = env
        self._v1 = optional("verifiers.v1", "verifiers")
        agent = {"runtime": {"type": "subprocess"}, **args.get("agent", {})}
        try:
            taskset = {**args.get("taskset", {}), "id": env}
            self._config = self._v1.resolve_env_config({**args, "taskset": taskset, "agent": agent})
            self._taskset = self._made().taskset
            if self._config.agent.runtime.type not in LOCAL_RUNTIMES:
                optional("verifiers.v1.utils.prime", "verifiers").ensure_prime_auth()
        except (Exception, SystemExit) as error:
            raise ValueError(f"rollout.agent_args.env={env}: cannot be loaded: {with_causes(error)}") from error

    async def run(self, task: HarnessTask, row: Mapping[str, Any] | None, client: Any) -> RewardResult | None:
        """Play one rollout. Raises RolloutError, and ValueError for a row that is not of its taskset."""
        if row is None:
            raise ValueError("verifiers from 0.4 on needs rows of data.loader=rollout.environments.verifiers:rows")
        kind = type(self._taskset).task_type()
        own = kind(kind.data_type().model_validate(dict(row)), self._config.taskset.task)
        environment = self._made()  # one per episode: it holds the proxy
        with _variable(client.api_key) as variable:
            endpoint = self._v1.EvalClientConfig(base_url=str(client.base_url), api_key_var=variable)
            async with environment.serving():
                episode = await environment.run_episode(own, self._v1.ModelContext(model="policy", client=endpoint))
        return self._result(episode)

    def rows(self, split: str) -> list[tuple[Any, str, Mapping[str, Any]]]:
        if split != "train":
            raise ValueError(f"data.train_files={self._name}@{split}: a taskset has no splits; say which by its args")
        if not self._taskset.bounded:
            raise ValueError(f"data.train_files={self._name}: the taskset has no end")
        rows = [task.data for task in self._taskset]
        return [(data.prompt_text, "", data.model_dump(mode="json")) for data in rows]

    def _made(self) -> Any:
        return self._v1.load_environment(self._config)

    def _result(self, episode: Any) -> RewardResult | None:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            why = f"{errors[-1].type}: {errors[-1].message}" if errors else "it did not complete"
            raise RolloutError(f"the environment {self._name} failed: {why}")
        if len(episode.traces) > 1:
            raise RolloutError(f"the environment {self._name} has {len(episode.traces)} agents, and an episode has one")
        (trace,) = episode.traces
        rewards = {name: reward for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        scores = {name: float(reward.score) for name, reward in rewards.items()}
        return RewardResult(reward=float(trace.reward), metrics=metrics | scores) if rewards else None


@contextmanager
def _variable(key: str) -> Iterator[str]:
    """Give the name of an environment variable with the key, since verifiers takes keys from nowhere else. Its
    subprocesses do not inherit variables with API_KEY in their names."""
    name = f"SESSION_{uuid.uuid4().hex.upper()}_API_KEY"
    os.environ[name] = key
    try:
        yield name
    finally:
        del os.environ[name]
