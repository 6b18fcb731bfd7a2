"""Tasks in the format of Harbor (https://harborframework.com): folders with an instruction, files to begin with, and
tests that write the reward. Harbor itself is not needed.

data.harbor=FOLDER stands for the keys that name this reader, the agent loop and the reward (configs/harbor.py).

What is read of a task: `instruction.md`; of `task.toml` the environment's `docker_image`, `workdir`, `env` and
`memory_mb`, and the verifier's `timeout_sec` and `env`; of `environment/Dockerfile` its WORKDIR, ENV and COPY, and
without a Dockerfile all files of `environment/`; `tests/`, which are copied into the sandbox when the agent has ended.
"""

import json
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from string import Template
from typing import Any

from configs.sandbox import SandboxBackend, SandboxConfig
from configs.validate import ConfigError
from rollout.environments.sandbox.launching import FOLDERS, MIB, shipped_tasks
from rollout.environments.sandbox.sandbox import ENVIRONMENT, MAX_FILE_BYTES, Sandbox, SandboxFileError
from rollout.rewards.base import RewardResult
from rollout.types import Prompt

COLUMN = "harbor_task"
"""The column of a row with the folder of its task."""
SHIPPED = "slipstream/tasks"
"""The entry of data.train_files that stands for the tasks in `tasks/`."""
WORKDIR = "/app"
REWARD_TXT, REWARD_JSON = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"
MAX_REWARD_BYTES = 65_536
MAX_REWARD = 1e6
"""The largest reward, and number beside it. With larger ones, the advantages of a group are no numbers any more."""
MAX_METRICS = 32
NAME = re.compile(r"\w[\w.-]{0,63}", re.ASCII)
"""A name of a number beside the reward. Others are left out."""
VERIFIER_ENV = {"HOME": "/tests", "PYTHONNOUSERSITE": "1"}
"""Programs of the tests read no settings and no modules that the agent has put into its home."""
VERIFIER_TIMEOUT_S = 600.0
"""Harbor's own default."""
IGNORED = ("FROM", "CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "USER", "SHELL", "MAINTAINER", "HEALTHCHECK", "STOPSIGNAL")
"""Words of a Dockerfile that change nothing here: agents run commands of their own, by a user of the sandbox."""


class TaskError(ConfigError):
    """A task that cannot be read, or needs what is not there. The message names its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedFile:
    """A file that a sandbox gets."""

    source: Path
    path: str
    """Its place in the sandbox."""
    mode: int
    size: int
    """Its bytes."""

    @classmethod
    def of(cls, source: Path, path: str) -> "CopiedFile":
        status = source.stat()
        return cls(source=source, path=path, mode=0o755 if status.st_mode & 0o100 else 0o644, size=status.st_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task as it is read from its folder."""

    folder: Path
    instruction: str
    workdir: str
    docker_image: str | None = None
    needs_build: str | None = None
    """The reason why the task needs an image that was built of its Dockerfile; None where it can do without."""
    memory_mb: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    verifier_timeout_s: float = VERIFIER_TIMEOUT_S
    files: tuple[CopiedFile, ...] = ()
    """The files that the agent finds."""
    tests: tuple[CopiedFile, ...] = ()

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def build_folder(self) -> Path:
        """The folder of the Dockerfile."""
        return self.folder / "environment"

    def image(self, config: SandboxConfig) -> str | None:
        """Return the image that the task runs on; None for sandbox.image. Raises TaskError where the sandboxes of the
        run cannot do what the task needs."""
        if self.memory_mb is not None and self.memory_mb > config.memory_mb:
            needs = f"needs memory_mb={self.memory_mb}, and sandbox.memory_mb={config.memory_mb}"
            raise TaskError(f"{self.folder}: {needs}: set that to {self.memory_mb}")
        if self.docker_image is None and self.needs_build is not None:
            if config.backend is SandboxBackend.harbor:
                self._check_room(self.tests, config)
                return str(self.build_folder)
            raise TaskError(self.needs_build)
        self._check_room((*self.files, *self.tests), config)
        if config.backend is not SandboxBackend.bubblewrap:
            return self.docker_image
        if self.docker_image is not None and config.image is None:
            unpacked = "sandbox.image=FOLDER, in which `docker export` of a container of it is unpacked"
            needs = f"docker_image={self.docker_image} needs {unpacked}, or sandbox.backend=docker or podman"
            raise TaskError(f"{self.folder}: {needs}; this is sandbox.backend=bubblewrap without sandbox.image")
        return None

    def _check_room(self, copied: Sequence[CopiedFile], config: SandboxConfig) -> None:
        """Raise TaskError for files that no sandbox takes: it would look as if the agent had left no room for them."""
        is_one_disk, by_disk = config.backend is SandboxBackend.bubblewrap, Counter[str]()
        for file in copied:
            if file.size > MAX_FILE_BYTES:
                raise TaskError(f"{file.source}: has {file.size} bytes, and at most {MAX_FILE_BYTES} are copied")
            by_disk["" if is_one_disk else PurePosixPath(file.path).parts[1]] += file.size  # in a container by folder
        largest = max(by_disk.values(), default=0)
        if config.backend is not SandboxBackend.harbor and largest > config.disk_mb * MIB:
            needs = f"its files have {largest} bytes, and sandbox.disk_mb={config.disk_mb}"
            raise TaskError(f"{self.folder}: {needs}: set that to more")


# -- rows --------------------------------------------------------------------------------------------------------------


def rows(entries: str) -> list[dict[str, Any]]:
    """Return a row for each task of the folders `entries`, which are separated by commas: a task itself, or a folder of
    tasks. `slipstream/tasks` is the folder of the tasks that come with this package. Raises TaskError."""
    folders = [folder for entry in entries.split(",") for folder in _task_folders(entry.strip())]
    tasks = [read_task(folder) for folder in folders]
    return [
        {"question": task.instruction, "answer": task.name, "data_source": "harbor", COLUMN: str(task.folder)}
        for task in tasks
    ]


def task_of(prompt: Prompt) -> Task | None:
    """Return the task of a row; None for a row of other data. Raises TaskError."""
    folder = prompt.extra.get(COLUMN)
    return None if folder is None else read_task(Path(folder))


def _task_folders(entry: str) -> list[Path]:
    folder = Path(entry).expanduser()
    if entry == SHIPPED and not folder.exists():
        folder = shipped_tasks()
    if not folder.is_dir():
        raise TaskError(f"{entry}: no such folder")
    if (folder / "task.toml").is_file():
        return [folder.resolve()]
    tasks = sorted(file.parent.resolve() for file in folder.glob("*/task.toml"))
    if not tasks:
        raise TaskError(f"{entry}: has no task.toml, nor a folder that has one")
    return tasks


# -- reading -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def read_task(folder: Path) -> Task:
    """Read a task. Raises TaskError, which names the file and what is wrong with it."""
    file = folder / "task.toml"
    try:
        settings = tomllib.loads(_text(file))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{file}: {error}") from error
    environment, verifier = (_table(settings, name, file) for name in ("environment", "verifier"))
    if "steps" in settings:
        raise TaskError(f"{file}: has steps, and only tasks of one step are read")
    image = environment.get("docker_image")
    recipe = folder / "environment" / "Dockerfile"
    if recipe.is_file():
        workdir, env, files, needs_build = _built(recipe)
    else:
        workdir, env, files, needs_build = WORKDIR, {}, list(_tree(folder / "environment", WORKDIR)), None
    workdir = str(environment.get("workdir") or workdir)
    if not is_writable(workdir):
        raise TaskError(f"{folder}: its workdir {workdir} must be in one of {_writable()}")
    tests = tuple(_tree(folder / "tests", "/tests"))
    if not any(test.path == "/tests/test.sh" for test in tests):
        raise TaskError(f"{folder}: has no tests/test.sh")
    return Task(
        folder=folder,
        instruction=_text(folder / "instruction.md"),
        workdir=workdir,
        docker_image=image,
        needs_build=needs_build,
        memory_mb=environment.get("memory_mb"),
        env={**env, **_texts(environment.get("env", {}))},
        verifier_env=_texts(verifier.get("env", {})),
        verifier_timeout_s=float(verifier.get("timeout_sec", VERIFIER_TIMEOUT_S)),
        files=tuple(files),
        tests=tests,
    )


def _table(settings: Mapping[str, Any], name: str, file: Path) -> Mapping[str, Any]:
    table = settings.get(name, {})
    if not isinstance(table, dict):
        raise TaskError(f"{file}: {name} must be a table")
    return table


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{file}: cannot be read: {error}") from error


def _texts(table: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in table.items()}


def _built(recipe: Path) -> tuple[str, dict[str, str], list[CopiedFile], str | None]:
    """Return the workdir, variables and files that a Dockerfile makes, and, where it has what only a build does, the
    reason why it needs one. Raises TaskError for files that cannot be copied."""
    workdir, env, files, needs_build = WORKDIR, dict[str, str](), list[CopiedFile](), None
    for line in _text(recipe).replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        word = word.upper()
        if not word or word.startswith("#") or word in IGNORED:
            continue
        if word == "WORKDIR":
            workdir = str(PurePosixPath(workdir) / rest.strip())
        elif word in ("ENV", "ARG") and "=" in rest:
            env |= _variables(rest, env) if word == "ENV" else {}
        elif word in ("COPY", "ADD") and not rest.strip().startswith("["):
            files += _copied(recipe, rest, workdir)
        else:
            wrong = f"{word} needs an image that was built: name it as docker_image in task.toml"
            needs_build = needs_build or f"{recipe}: {wrong}, leave it out, or set sandbox.backend=harbor"
    return workdir, env, files, needs_build


def _variables(rest: str, before: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an ENV. They may name others, of the lines before."""
    pairs = (part.split("=", 1) for part in shlex.split(rest) if "=" in part)
    return {name: Template(value).safe_substitute({**ENVIRONMENT, **before}) for name, value in pairs}


def _copied(recipe: Path, rest: str, workdir: str) -> Iterator[CopiedFile]:
    """Yield the files of a COPY."""
    words = [word for word in shlex.split(rest) if not word.startswith("--chmod=") and not word.startswith("--chown=")]
    *names, target = words
    base = PurePosixPath(workdir) / target
    if not names or any(name.startswith("--") for name in names) or not is_writable(str(base)):
        raise TaskError(f"{recipe}: COPY {rest}: must copy files of this folder into one of {_writable()}")
    for name in names:
        source = recipe.parent / name
        if not source.resolve().is_relative_to(recipe.parent.resolve()) or not source.exists():
            raise TaskError(f"{recipe}: COPY {rest}: there is no {name} in {recipe.parent}")
        if source.is_dir():
            yield from _tree(source, str(base))
        else:
            is_folder = target.endswith("/") or target in (".", "..") or len(names) > 1 or str(base) == workdir
            yield CopiedFile.of(source, str(base / source.name if is_folder else base))


def _tree(folder: Path, target: str) -> Iterator[CopiedFile]:
    """Yield the files below a folder. Raises TaskError for a link, which might lead out of the task."""
    for file in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if file.is_symlink():
            raise TaskError(f"{file}: is a link, and must be a file")
        if file.is_file():
            yield CopiedFile.of(file, str(PurePosixPath(target) / file.relative_to(folder).as_posix()))


def is_writable(path: str) -> bool:
    """Return whether a sandbox can write there."""
    parts = PurePosixPath(path).parts
    return len(parts) > 1 and parts[0] == "/" and parts[1] in FOLDERS and ".." not in parts


def _writable() -> str:
    return ", ".join(f"/{name}" for name in FOLDERS)


# -- running -----------------------------------------------------------------------------------------------------------


async def set_up(sandbox: Sandbox, task: Task) -> None:
    """Write the files that the agent finds. Raises SandboxFileError and SandboxLostError."""
    if sandbox.image != str(task.build_folder):  # an image of its Dockerfile has them already
        await _write(sandbox, task.files)
    made = await sandbox.exec(["mkdir", "-p", task.workdir, "/logs/agent", "/logs/verifier"])
    if not made.is_success:
        raise SandboxFileError(f"{task.folder}: {made.text()}")


async def verified(sandbox: Sandbox, task: Task, timeout_s: float) -> RewardResult:
    """Run the tests of a task, which the sandbox gets only now, after all that the agent left running has ended.

    Tests that reach a limit, or write no reward, give 0: what they run is the agent's. Raises SandboxLostError.
    """
    unverified = RewardResult(reward=0.0, metrics={"verified": 0.0})
    try:
        await sandbox.clear("tests", "logs", "solution")
        await _write(sandbox, task.tests)
        made = await sandbox.exec(["mkdir", "-p", "/logs/verifier"])
    except SandboxFileError:  # the agent has left no room for them
        return unverified
    if not made.is_success:
        return unverified
    environment = {**task.env, **VERIFIER_ENV, **task.verifier_env}
    outcome = await sandbox.exec(["bash", "/tests/test.sh"], cwd=task.workdir, env=environment, timeout_s=timeout_s)
    rewards = {} if outcome.limit is not None else await _rewards(sandbox)
    if "reward" not in rewards:
        return unverified
    others = {name: value for name, value in rewards.items() if name != "reward"}
    return RewardResult(reward=rewards["reward"], metrics={**others, "verified": 1.0})


async def _rewards(sandbox: Sandbox) -> dict[str, float]:
    """Return the numbers that the tests have written, the reward as "reward". As with Harbor, reward.json is read only
    where there is no reward.txt."""
    try:
        text = await sandbox.read_file(REWARD_TXT, most=MAX_REWARD_BYTES)
    except SandboxFileError:
        return await _rewards_of_json(sandbox)
    with suppress(ValueError):
        return _sound({"reward": float(text)})
    return {}


async def _rewards_of_json(sandbox: Sandbox) -> dict[str, float]:
    numbers: dict[str, float] = {}
    with suppress(SandboxFileError, ValueError, OverflowError, RecursionError):
        written = json.loads(await sandbox.read_file(REWARD_JSON, most=MAX_REWARD_BYTES))
        if isinstance(written, dict):
            numbers = {str(name): float(value) for name, value in written.items() if isinstance(value, int | float)}
    if "reward" not in numbers and len(numbers) == 1:
        numbers = {"reward": next(iter(numbers.values()))}
    return _sound(numbers)


def _sound(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers that a run can work with. What the agent's program has written may be among them."""
    sound = {name: value for name, value in numbers.items() if NAME.fullmatch(name) and abs(value) <= MAX_REWARD}
    return dict(sorted(sound.items(), key=lambda item: item[0] != "reward")[:MAX_METRICS])


async def _write(sandbox: Sandbox, files: tuple[CopiedFile, ...]) -> None:
    for file in files:
        await sandbox.write_file(file.path, file.source.read_bytes(), mode=file.mode)
