"""`train`, `evaluate`, `sft` and `serve` of Python make the command line that a person would type."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig

from configs.checkpoint import MARKER
from configs.schema import Config
from configs.validate import ConfigError
from rollout.actors.packed import CarriedError
from rollout.rewards.gsm8k import gsm8k
from scripts.api import commands
from scripts.api.commands import evaluate, sft, train
from scripts.api.process import Outcome
from scripts.api.results import TrainResult, UnprovenError
from scripts.command.command import FAILED, STOPPED, UNPROVEN
from tests.support.compose import resolve
from tests.support.plain_tools import Counter, power

ROWS = [{"question": f"{number} + 1?", "answer": str(number + 1)} for number in range(20)]


@dataclass
class Started:
    """Takes the place of `CommandProcess`: it starts nothing, and ends as it is told."""

    outcome: Outcome
    lines: list[tuple[str, list[str]]] = field(default_factory=list)

    def __call__(self, command: str, arguments: Sequence[str]) -> "Started":
        self.lines.append((command, list(arguments)))
        return self

    def wait(self) -> Outcome:
        return self.outcome

    @property
    def config(self) -> Config:
        return resolve(*self.lines[-1][1], "dry_run=true")


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    monkeypatch.chdir(tmp_path)
    started = Started(Outcome(exit_code=0, run_dir=tmp_path / "run"))
    monkeypatch.setattr(commands, "CommandProcess", started)
    return started


def test_rows_are_kept_in_the_run_folder_and_a_tenth_is_held_out(started: Started) -> None:
    train(data=ROWS, reward=gsm8k, trainer={"lr": 1e-4}, **{"rollout.max_staleness": 1})
    (command, line), config = started.lines[-1], started.config
    assert command == "train" and config.rollout.reward == "rollout.rewards.gsm8k:gsm8k"
    assert (config.trainer.lr, config.rollout.max_staleness, config.data.val_share) == (1e-4, 1, 0.1)
    file = Path(str(config.data.train_files))
    assert [json.loads(row) for row in file.read_text().splitlines()] == ROWS
    (folder,) = [word.partition("=")[2] for word in line if word.startswith("hydra.run.dir=")]
    assert file.parent.parent == Path(folder) and file.parent.parent.parent == Path.cwd() / "runs"


def test_what_is_held_out_may_be_rows_files_a_share_or_said_by_an_override(started: Started) -> None:
    for held_out, override, expected in (
        (ROWS[:3], {}, None),
        (0.5, {}, 0.5),
        (None, {"data.val_share": 0.2}, 0.2),
        (None, {"data.val_files": "none"}, None),
    ):
        train(data=ROWS, held_out=held_out, **override)
        assert started.config.data.val_share == expected
    assert started.config.data.val_files == "none"
    train(data="a.jsonl", held_out="b.jsonl")
    assert (started.config.data.train_files, started.config.data.val_files) == ("a.jsonl", "b.jsonl")


def test_a_number_is_no_data_and_a_share_only_of_what_train_holds_out(started: Started) -> None:
    for key, call in (
        ("sft.val_files", lambda: sft(data="a.jsonl", held_out=0.1)),  # pyright: ignore[reportArgumentType]
        ("data.val_files", lambda: evaluate("tiny", data=0.1)),  # pyright: ignore[reportArgumentType]
        ("data.train_files", lambda: train(data=5)),  # pyright: ignore[reportArgumentType]
    ):
        with pytest.raises(ConfigError, match=f"{key}: must be rows, a file or keys of the section"):
            call()
    assert not started.lines


def test_a_tenth_is_held_out_of_files_that_are_keys_too(started: Started) -> None:
    train(data={"train_files": "a.jsonl", "prompt_key": "problem"})
    data = started.config.data
    assert (data.train_files, data.val_share, data.prompt_key) == ("a.jsonl", 0.1, "problem")
    train(data={"train_files": "a.jsonl", "val_files": "none"})
    assert (started.config.data.val_share, started.config.data.val_files) == (None, "none")
    train(data={"harbor": "slipstream/tasks"}, model="chat")
    assert started.config.data.loader == "rollout.environments.sandbox.harbor:rows"


def test_a_model_is_a_choice_a_hub_name_or_a_folder_and_else_refused(started: Started, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    train(model="mine")
    assert started.lines[-1][1] == ["model=hf", "model.path=mine"]
    with pytest.raises(
        ConfigError, match=r"model=tinny: must be chat, hf, small, tiny, a hub name \(OWNER/NAME\) or a f"
    ):
        train(model="tinny")


def test_a_resumed_run_with_rows_needs_its_folder(started: Started, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="resume=auto: needs hydra.run.dir"):
        train(data=ROWS, resume="auto")
    train(data=ROWS, resume="auto", run_dir=tmp_path / "mine")
    assert Path(str(started.config.data.train_files)).parent == tmp_path / "mine" / "data"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"recipe": "gsm8k"}, "recipe=gsm8k"),
        ({"model": "tiny"}, "model=tiny"),
        ({"model": "org/name"}, "model=hf model.path=org/name"),
        ({"model": {"path": "x", "lora": {"rank": 8}}}, "model.path=x model.lora.rank=8"),
        ({"data": {"prompt_key": "prompt"}}, "data.prompt_key=prompt"),
        ({"agent": "my_agent:run"}, "rollout.agent=my_agent:run"),
        ({"agent": "codex exec {prompt}"}, "rollout.agent_command='\"codex exec {prompt}\"'"),
        ({"reward": [gsm8k, (0.5, "format")]}, "rollout.reward='\"rollout.rewards.gsm8k:gsm8k+0.5*format\"'"),
        ({"algorithm": {"loss": gsm8k}}, "algorithm.loss=rollout.rewards.gsm8k:gsm8k"),
    ],
)
def test_arguments_are_words_of_the_command_line(given: dict[str, Any], line: str, started: Started) -> None:
    train(**given)
    assert started.lines == [("train", shlex.split(line))]


def test_environments_and_tools_are_agent_loops_that_the_config_names(started: Started) -> None:
    train(environment=Counter, max_turns=3)
    assert started.lines[-1][1] == [
        "rollout.agent_loop=rollout.environments.named:environment",
        "rollout.agent_args.max_turns=3",
        "rollout.agent_args.environment=tests.support.plain_tools:Counter",
    ]
    train(tools=[power])
    tools = "rollout.agent_args.tools=[tests.support.plain_tools:power]"
    assert started.lines[-1][1][1:] == [tools, "data.chat_template=true"]
    with pytest.raises(ConfigError, match="environment and tools: an episode has one of them"):
        train(environment=Counter, tools=[power])
    with pytest.raises(ConfigError, match="max_turns=3: counts the turns"):
        train(max_turns=3)


def test_functions_that_no_run_can_use_are_refused_before_any_process_starts(started: Started) -> None:
    with pytest.raises(ConfigError, match="tools=<.*lambda.*>: .* needs a name, which a def has"):
        train(tools=[lambda number: number])
    with pytest.raises(ConfigError, match=r"environment=<gsm8k of .*>: .* must be callable with \(prompt\)"):
        train(environment=gsm8k)
    with pytest.raises(ConfigError, match="data.train_files: must be rows, a file or keys of the section, is function"):
        train(data=lambda: ROWS)  # pyright: ignore[reportArgumentType]
    assert started.lines == []


def test_an_unknown_key_is_refused_before_rows_are_written(started: Started, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trainer.learning_rate=1: there is no such key"):
        train(data=ROWS, trainer={"learning_rate": 1})
    assert not (tmp_path / "runs").exists() and started.lines == []


def test_conversations_of_sft_are_rows_too(started: Started) -> None:
    sft(data=[{"messages": [{"role": "user", "content": "?"}]}], model="chat")
    command, line = started.lines[-1]
    assert command == "sft" and line[0] == "model=chat" and line[1].startswith("sft.train_files=")


def test_a_folder_is_evaluated_as_the_command_does(started: Started, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "evaluation.json").write_text('{"scores": {"": {"avg@1": 0.5}}}')
    started.outcome = Outcome(exit_code=0, run_dir=tmp_path / "run", accuracy=0.5)
    result = evaluate(tmp_path / "run", evaluation={"samples": 4})
    assert started.lines == [("evaluate", [str(tmp_path / "run"), "evaluation.samples=4"])]
    assert (result.accuracy, result.scores) == (0.5, {"": {"avg@1": 0.5}})


class OwnError(Exception):
    pass


@pytest.mark.parametrize("error", [ConfigError("trainer.lr=0: must be above 0"), OwnError("the loader failed")])
def test_errors_come_out_as_they_were_raised(error: Exception, started: Started) -> None:
    started.outcome = Outcome(exit_code=FAILED, error=f"failed: {error}", carried=CarriedError.of(error))
    with pytest.raises(type(error), match=str(error)):
        train()


def test_other_ends_are_errors_too(started: Started, tmp_path: Path) -> None:
    started.outcome = Outcome(exit_code=STOPPED)
    with pytest.raises(KeyboardInterrupt):
        train()
    started.outcome = Outcome(exit_code=-9, error="the process of the command ended: killed by SIGKILL")
    with pytest.raises(RuntimeError, match="killed by SIGKILL"):
        train()
    started.outcome = Outcome(exit_code=UNPROVEN, error="the audit: slipstream audit x", run_dir=tmp_path)
    with pytest.raises(UnprovenError, match="the audit") as raised:
        train()
    assert raised.value.result.run_dir == tmp_path


def test_the_best_checkpoint_is_the_kept_one_with_the_best_accuracy(tmp_path: Path) -> None:
    result = TrainResult(run_dir=tmp_path, summary={"accuracy_after": 0.6})
    assert (result.best_checkpoint, result.last_checkpoint, result.metrics) == (None, None, ())
    for step in (10, 20, 30, 40):
        folder = tmp_path / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        if step != 40:  # a save that has not ended
            (folder / MARKER).write_text("{}")
    accuracies = {5: 0.9, 10: 0.7, 20: 0.8, 30: 0.8}
    lines = [json.dumps({"step": step, "eval/accuracy": accuracy}) for step, accuracy in accuracies.items()]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 30, "actor/lr": 0.1}']) + "\n")
    result = TrainResult(run_dir=tmp_path, summary={"accuracy_after": 0.6})
    assert result.last_checkpoint == result.best_checkpoint == tmp_path / "checkpoints" / "step_000030"
    assert result.accuracy == 0.6 and len(result.metrics) == 5


def test_a_share_may_be_a_number_of_numpy(started: Started) -> None:
    train(data=ROWS, held_out=np.float64(0.2))  # pyright: ignore[reportArgumentType]
    assert started.config.data.val_share == 0.2


def test_a_script_under_a_hydra_of_its_own_keeps_it(started: Started, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("a: 1\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3", job_name="theirs"):
        HydraConfig.instance().set_config(compose("theirs", return_hydra_config=True))
        train(data=ROWS)
        assert HydraConfig.get().job.name == "theirs" and compose("theirs").a == 1
    assert started.lines[-1][0] == "train"
