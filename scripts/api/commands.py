"""The commands as functions of Python: `train`, `sft`, `evaluate` and `serve` (docs/python.md).

Each makes the command line that a person would type, and runs the command in a process of its own. Nothing else decides
what a run does: what is allowed, what is checked and what a run folder holds is what the command has.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from configs.cli.arguments import quoted
from configs.cli.compose import ComposedJob, beside_another_hydra, compose_job, folder, refuse_new_folder
from configs.cli.evaluated_run import expand_folder
from configs.cli.help import list_options
from configs.cli.overrides import check_overrides
from configs.serve import ADDRESS_FILE
from configs.validate import ConfigError
from rollout.actors.packed import CarriedError
from scripts.api import functions
from scripts.api.functions import reference, refuse
from scripts.api.process import CommandProcess, Outcome
from scripts.api.results import EvaluationResult, Server, TrainResult, UnprovenError, read_summary
from scripts.api.words import Reward, reward_text, text, words
from scripts.command.command import STOPPED, UNPROVEN
from trainer.tracking.sinks import write_atomically

Rows = Iterable[Mapping[str, Any]]
Data = str | PathLike[str] | Rows | Mapping[str, Any]
"""Rows; or files, as data.train_files names them; or the keys of the section `data`."""
VAL_SHARE = 0.1
"""The share of the prompts that is held out, where data is given to `train` and nothing says what is held out."""
LOOPS = "rollout.environments.named"
ROWS_FOLDER = "data"
"""The folder of the rows in a run folder."""


def train(
    recipe: str | None = None,
    *,
    model: str | PathLike[str] | Mapping[str, Any] | None = None,
    data: Data | None = None,
    held_out: Data | float | None = None,
    reward: Reward | None = None,
    agent: str | Callable[..., Any] | None = None,
    environment: Callable[..., Any] | None = None,
    tools: Sequence[Callable[..., Any]] | None = None,
    max_turns: int | None = None,
    run_dir: str | PathLike[str] | None = None,
    **overrides: Any,
) -> TrainResult:
    """Train, and return what came of it.

    Example:
        train("arithmetic", reward=my_reward, trainer={"lr": 1e-4}, **{"rollout.max_staleness": 1})

    Args:
        recipe: A name of configs/recipe.
        model: A choice of the group `model` (tiny, small, hf), a hub name, or a folder; or keys of the section.
        data: Rows, which are kept in the run folder, or files; or keys of the section.
        held_out: The same for the held-out set; a number is the share of `data` that is held out. A tenth is, where
            neither this, the recipe nor an override says it.
        reward: A function of (prompt, text), a name of rollout.reward, (weight, reward), or a list, which is added.
        agent: A harness: an async function of (task, client), a name of rollout.agent, or a command of the shell.
        environment: A class, or a function of (prompt), that makes the environment of an episode.
        tools: Functions that the policy may call, by the chat template.
        max_turns: The most turns of an episode with `environment` or `tools`.
        run_dir: The run folder; a new one below runs/ by default.
        overrides: Any keys, nested or dotted, as on the command line. A function is a value like any other.

    Raises:
        ConfigError: The config is refused; nothing was started.
        UnprovenError: The audit found something in the records of a run that trained to its end.
        KeyboardInterrupt: Ctrl-C, or another signal, stopped the run.
        Exception: What ended the run, as the command prints it.
    """
    line = [*_recipe(recipe), *_model(model)]
    if reward is not None:
        line.append(f"rollout.reward={quoted(reward_text(reward))}")
    line += [*_agent(agent), *_loop(environment, tools, max_turns), *_sections(data, held_out)]
    line += words(overrides)
    files = {"data.train_files": data}
    if isinstance(held_out, int | float | np.number):
        line.append(f"data.val_share={text('data.val_share', held_out)}")
    else:
        files["data.val_files"] = held_out
    shares = held_out is None and data is not None and (not isinstance(data, Mapping) or "train_files" in data)
    line = _completed("train", line, files, run_dir, val_share=VAL_SHARE if shares else None)
    return _trained(_ended("train", line))


def sft(
    recipe: str | None = None,
    *,
    model: str | PathLike[str] | Mapping[str, Any] | None = None,
    data: Data | None = None,
    held_out: Data | None = None,
    run_dir: str | PathLike[str] | None = None,
    **overrides: Any,
) -> TrainResult:
    """Train on conversations, and return what came of it. Arguments and errors are those of `train`.

    Args:
        data: Conversations, as rows with `messages`, or files of them, as sft.train_files names them.
        held_out: The same for those whose loss is measured.
    """
    line = [*_recipe(recipe), *_model(model), *_sections(data, held_out), *words(overrides)]
    return _trained(
        _ended("sft", _completed("sft", line, {"sft.train_files": data, "sft.val_files": held_out}, run_dir))
    )


def evaluate(
    model: str | PathLike[str] | Mapping[str, Any] | None = None,
    *,
    recipe: str | None = None,
    data: Data | None = None,
    reward: Reward | None = None,
    run_dir: str | PathLike[str] | None = None,
    **overrides: Any,
) -> EvaluationResult:
    """Evaluate a model on held-out data.

    Example:
        evaluate(result.run_dir, evaluation={"samples": 4}).scores

    Args:
        model: A run folder or a checkpoint in one, whose data, reward and sizes are then the run's; a folder of Hugging
            Face; or as in `train`.
        data: The held-out rows, or files of them.

    The other arguments, and the errors, are those of `train`.
    """
    line = _recipe(recipe)
    is_folder = isinstance(model, str | PathLike) and Path(model).expanduser().is_dir()
    line = [str(Path(model).expanduser()), *line] if is_folder else [*line, *_model(model)]  # pyright: ignore
    if reward is not None:
        line.append(f"rollout.reward={quoted(reward_text(reward))}")
    if data is not None and not isinstance(data, Mapping):
        line.append("data.val_share=null")  # of a run that has held out a part of its own data
    line += [*_sections(data), *words(overrides)]
    outcome = _ended("evaluate", _completed("evaluate", line, {"data.val_files": data}, run_dir))
    assert outcome.run_dir is not None
    file = outcome.run_dir / "evaluation.json"
    report = json.loads(file.read_text(encoding="utf-8")) if outcome.accuracy is not None else {}
    return EvaluationResult(run_dir=outcome.run_dir, accuracy=outcome.accuracy, report=report)


def serve(
    model: str | PathLike[str] | Mapping[str, Any] | None = None,
    *,
    recipe: str | None = None,
    run_dir: str | PathLike[str] | None = None,
    **overrides: Any,
) -> Server:
    """Serve a model over HTTP in the background, and return the server once it answers. It takes a free port, unless
    serve.port names one. Arguments and errors are those of `train`."""
    line = [*_recipe(recipe), *_model(model), "serve.port=0", *words(overrides)]
    check_overrides(line)
    if run_dir is not None:
        line.append(f"hydra.run.dir={quoted(str(Path(run_dir).resolve()))}")
    with beside_another_hydra():
        where = Path(folder(compose_job("serve", line).hydra, "run")).resolve()
    (where / ADDRESS_FILE).unlink(missing_ok=True)  # of one that was killed
    process = CommandProcess("serve", [*line, f"hydra.run.dir={quoted(str(where))}"])
    try:
        while process.is_alive:  # until its own deadlines end it: rollout.start_timeout_s and others
            process.look()
            if (where / ADDRESS_FILE).is_file():
                url = (where / ADDRESS_FILE).read_text(encoding="utf-8")
                process.pass_on_from_here()
                return Server(url=url, run_dir=where, _process=process)
    except BaseException:
        process.stop()
        raise
    outcome = _raised(process.wait())
    raise RuntimeError(f"the server has ended: {outcome.error or f'exit code {outcome.exit_code}'}")


# -- the command line --------------------------------------------------------------------------------------------------


def _recipe(recipe: str | None) -> list[str]:
    return [] if recipe is None else [f"recipe={recipe}"]


def _model(model: str | PathLike[str] | Mapping[str, Any] | None) -> list[str]:
    """Return a choice of the group, the keys of the section, or the path with the choice that reads one."""
    match model:
        case None:
            return []
        case Mapping():
            return words({"model": model})
        case str() if model in list_options("model"):
            return [f"model={model}"]
        case str() if "/" not in model and not Path(model).is_dir():
            named = ", ".join(list_options("model"))
            raise ConfigError(f"model={model}: must be {named}, a hub name (OWNER/NAME) or a folder, which is not here")
    return ["model=hf", f"model.path={quoted(str(model))}"]


def _agent(agent: str | Callable[..., Any] | None) -> list[str]:
    if agent is None:
        return []
    if not isinstance(agent, str):
        return [f"rollout.agent={quoted(reference('rollout.agent', agent))}"]
    is_name = all(part.isidentifier() for part in agent.replace(":", ".").split("."))
    return [f"rollout.{'agent' if is_name else 'agent_command'}={quoted(agent)}"]


def _loop(
    environment: Callable[..., Any] | None, tools: Sequence[Callable[..., Any]] | None, max_turns: int | None
) -> list[str]:
    if environment is not None and tools is not None:
        raise ConfigError("environment and tools: an episode has one of them; an environment answers calls itself")
    if environment is None and tools is None:
        if max_turns is not None:
            raise ConfigError(
                f"max_turns={max_turns}: counts the turns with an environment or tools, and there are none"
            )
        return []
    arguments: dict[str, Any] = {} if max_turns is None else {"max_turns": max_turns}
    if environment is not None:
        refuse("environment", functions.environment, environment)
        arguments["environment"] = reference("environment", environment)
    for function in tools or ():
        refuse("tools", functions.tool, function)
    if tools is not None:
        arguments["tools"] = [reference("tools", function) for function in tools]
    loop = "environment" if environment is not None else "tools"
    shown = {} if tools is None else {"data.chat_template": True}  # which alone shows tools
    return words({"rollout.agent_loop": f"{LOOPS}:{loop}", "rollout.agent_args": arguments, **shown})


def _sections(*data: Data | float | None) -> list[str]:
    return [word for section in data if isinstance(section, Mapping) for word in words({"data": section})]


def _completed(
    command: str,
    line: Sequence[str],
    files: Mapping[str, Data | None],
    run_dir: str | PathLike[str] | None,
    val_share: float | None = None,
) -> list[str]:
    """Return the command line with the files of the data, of which rows are written into the run folder."""
    line = list(line)
    if run_dir is not None:
        line.append(f"hydra.run.dir={quoted(str(Path(run_dir).resolve()))}")
    rows: dict[str, bytes] = {}
    for key, data in files.items():
        if isinstance(data, str | PathLike):
            line.append(f"{key}={quoted(str(data))}")
        elif data is not None and not isinstance(data, Mapping):
            rows[key] = lines_of(key, data)
    if not rows and val_share is None:
        return line
    with beside_another_hydra():
        return [*line, *_of_rows(_composed(command, line), rows, run_dir, val_share)]


def _of_rows(
    job: ComposedJob, rows: Mapping[str, bytes], run_dir: str | PathLike[str] | None, val_share: float | None
) -> list[str]:
    """Write the rows into the run folder, and return the overrides that name them and what is held out."""
    line: list[str] = []
    if val_share is not None and job.config.data.val_files is None and job.config.data.val_share is None:
        line.append(f"data.val_share={val_share!r}")
    if rows:
        refuse_new_folder(job, "run")
        where = Path(folder(job.hydra, "run")).resolve()
        written = {key: write_rows(where, key.rpartition(".")[2].removesuffix("_files"), rows[key]) for key in rows}
        line += [f"{key}={quoted(str(file))}" for key, file in written.items()]
        line += [] if run_dir is not None else [f"hydra.run.dir={quoted(str(where))}"]
    return line


def _composed(command: str, line: Sequence[str]) -> ComposedJob:
    overrides = expand_folder(line) if command == "evaluate" else list(line)
    check_overrides(overrides)
    return compose_job(command, overrides)


# -- rows, which a resumed or replayed run reads again -----------------------------------------------------------------


def lines_of(key: str, rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the rows as JSON, one a line. Raises ConfigError, which names the row."""
    if not isinstance(rows, Iterable):
        raise ConfigError(f"{key}: must be rows, a file or keys of the section, is {type(rows).__name__}")
    lines: list[str] = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{key}: row {number} must be a dict, is {type(row).__name__}")
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=True, allow_nan=False, default=_plain))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{key}: row {number} is not JSON: {error}") from error
    if not lines:
        raise ConfigError(f"{key}: has no rows")
    return "".join(f"{line}\n" for line in lines).encode()


def _plain(value: object) -> Any:
    """Return numpy's numbers and arrays as Python's."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def write_rows(run_dir: Path, name: str, lines: bytes) -> Path:
    """Write the rows, and return their file. Its name says its content, so that no other run's file is replaced."""
    file = run_dir / ROWS_FOLDER / f"{name}-{sha256(lines).hexdigest()[:12]}.jsonl"
    write_atomically(file, lines)
    return file


# -- the end -----------------------------------------------------------------------------------------------------------


def _ended(command: str, line: Sequence[str]) -> Outcome:
    return _raised(CommandProcess(command, line).wait())


def _raised(outcome: Outcome) -> Outcome:
    """Return the outcome of a command that came to its end. Raise what ended any other."""
    if outcome.exit_code in (0, UNPROVEN):
        return outcome
    if outcome.exit_code == STOPPED:
        raise KeyboardInterrupt(outcome.error or "the command was stopped")
    if isinstance(outcome.carried, CarriedError):
        raise outcome.carried.unpacked("the process of the command")
    raise RuntimeError(outcome.error or f"the command ended with exit code {outcome.exit_code}")


def _trained(outcome: Outcome) -> TrainResult:
    assert outcome.run_dir is not None
    result = TrainResult(run_dir=outcome.run_dir, summary=read_summary(outcome.run_dir))
    if outcome.exit_code == UNPROVEN:
        raise UnprovenError(outcome.error, result)
    return result
