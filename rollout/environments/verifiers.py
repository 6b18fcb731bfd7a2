"""Environments of the package `verifiers` (PrimeIntellect-ai/verifiers) as harnesses: each asks the policy itself, over
the session of its episode, and gives the reward.

rollout.agent=rollout.environments.verifiers:agent rollout.agent_args.env=my_env
data.loader=rollout.environments.verifiers:rows data.train_files=my_env

An environment is, by the version of verifiers: before 0.4 what its module's `load_environment` makes
(rollout/environments/verifiers_legacy.py), since then a taskset, or an Env, of verifiers.v1
(rollout/environments/verifiers_v1.py).
"""

import json
import re
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from configs.data import parse_source
from rollout.agents.threads import in_thread
from rollout.environments.optional import optional
from rollout.environments.verifiers_legacy import LegacyEnvironment
from rollout.environments.verifiers_v1 import V1Environment
from rollout.rewards.base import RewardResult
from rollout.sessions.harness import HarnessTask

OLDEST, V1 = (0, 1, 14), (0, 4, 0)
"""Versions of verifiers: the oldest that can be used, and the first whose environments are those of verifiers.v1."""
ROW = "verifiers_row"
"""Column with the whole row of the environment's own data set."""


LoadedEnvironment = LegacyEnvironment | V1Environment
"""`run` plays one rollout, of a row of the environment's own data set if the task has one, and raises RolloutError.
`rows` returns (prompt, answer, row) of that data set, and raises ValueError for a split that it has not."""
_loaded: dict[tuple[str, str], LoadedEnvironment] = {}
_loading = threading.Lock()


async def agent(
    task: HarnessTask, client: Any, *, env: str, args: Mapping[str, Any] | None = None, load_timeout_s: float = 600.0
) -> RewardResult | None:
    """Run one rollout. Returns the reward and the metrics of the environment; None, which leaves the reward to
    rollout.reward, for one that scores nothing.

    Args:
        task: a row of `rows`; before 0.4 of any data, whose prompt, ground truth and `info` are the input.
        client: an openai.AsyncOpenAI of the session.
        env: name of the environment, or of its module.
        args: keyword arguments of its load_environment; since 0.4 keys of its EnvConfig, such as `taskset`.
        load_timeout_s: for the first episode in a process, which loads it.

    Raises:
        RolloutError: the environment or its scoring failed.
        ImportError, ValueError: as `load` does.
    """
    arguments = dict(args or {})
    environment = _loaded.get(_key(env, arguments))
    if environment is None:
        environment = await in_thread(lambda: load(env, arguments), load_timeout_s, "load_timeout_s", f"loading {env}")
    return await environment.run(task, task.extra.get(ROW), client)


def rows(entries: str) -> list[dict[str, Any]]:
    """Return the environment's own data set, for data.loader with data.prompt_key=prompt and data.answer_key=answer.

    `entries`: `name`, `name@train` or `name@eval`; where it takes arguments, a JSON object such as
    {"env": "my_env", "args": {"size": 100}, "split": "eval"}.

    Raises:
        ValueError: it says no environment or no such split.
    """
    env, args, split = _parsed(entries)
    return [
        {"prompt": prompt, "answer": answer, "data_source": env, ROW: row}
        for prompt, answer, row in load(env, args).rows(split)
    ]


def load(env: str, args: Mapping[str, Any]) -> LoadedEnvironment:
    """Return the environment, which is loaded once per process. Blocks.

    Raises:
        ImportError: verifiers is not installed, or too old.
        ValueError: the environment cannot be loaded or cannot be used. It names rollout.agent_args.env.
    """
    with _loading:
        key = _key(env, args)
        if key not in _loaded:
            version = _checked(optional("verifiers", "verifiers, as docs/environments.md says"))
            _loaded[key] = (LegacyEnvironment if version < V1 else V1Environment)(env, args)
        return _loaded[key]


def _checked(package: ModuleType) -> tuple[int, ...]:
    """Return the version. Raises ImportError for one that is too old: pip takes one that fits the other packages."""
    version = tuple(int(number) for number in re.findall(r"\d+", package.__version__)[:3])
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        why = f"verifiers {package.__version__} is installed, and {oldest} or later is needed"
        raise ImportError(f"{why}: docs/environments.md says how it is installed")
    return version


def _key(env: str, args: Mapping[str, Any]) -> tuple[str, str]:
    return env, json.dumps(dict(args), sort_keys=True, default=str)


def _parsed(entries: str) -> tuple[str, dict[str, Any], str]:
    """Return the environment, its arguments and the split."""
    if entries.lstrip().startswith("{"):
        setup = json.loads(entries)
        unknown = sorted(set(setup) - {"env", "args", "split"})
        if unknown or "env" not in setup:
            raise ValueError(f"data.train_files={entries}: has keys {sorted(setup)}; allowed: env, args, split")
        return setup["env"], dict(setup.get("args", {})), setup.get("split", "train")
    source = parse_source(entries.strip())
    return source.name, {}, source.split or "train"
