"""A run says at its end what it has reached, and names commands that would be accepted."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from configs import load
from configs.checkpoint import MARKER
from scripts.command.ending import CommandLine, ending, stopped
from scripts.slipstream import COMMANDS
from tests.support.compose import CONFIGS

SUMMARY = {"accuracy_before": 0.0979, "accuracy_after": 0.977, "steps": 60, "seconds": 198.4}
GIVEN = (
    "recipe=gsm8k",
    "model=small",
    "model.warmup_steps=60",
    "trainer.lr=1e-4",
    "trainer.total_steps=60",
    "rollout.reward=gsm8k+0.1*format",
    "sessions.tool_parser=hermes",
    "evaluation.samples=4",
    "evaluation.temperature=1.0",
    "resume=runs/old",
)


def given(folder: Path, *overrides: str, run: str = "runs/first", checkpoints: tuple[int, ...] = ()) -> CommandLine:
    for step in checkpoints:
        saved = folder / run / "checkpoints" / f"step_{step:06d}"
        saved.mkdir(parents=True)
        (saved / MARKER).touch()
    (folder / run / "checkpoints" / "step_000099").mkdir(parents=True)  # whose save did not end
    (folder / run / "checkpoints" / ".step_000099.0123abcd").mkdir(parents=True)
    return CommandLine(
        run_dir=folder / run,
        overrides=overrides,
        sizes="small",
        python=folder / ".venv/bin/python",
        folder=folder,
    )


def rows(text: str) -> dict[str, str]:
    """Return the lines below the first, by their names."""
    return {line[2:16].strip(): line[16:] for line in text.splitlines()[1:]}


def composed(command: str) -> tuple[str, list[str]]:
    """The script of a command, and what its words come to as the run they ask for."""
    python, dash_m, package, name, *words = shlex.split(command)
    assert (python, dash_m, package) == (".venv/bin/python", "-m", "scripts") and name in COMMANDS
    if name in ("train", "serve"):
        load.register()
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            compose(name, overrides=words)
    return name, words


def test_a_run_that_ends_names_what_it_reached_and_left_and_commands_that_work(tmp_path: Path) -> None:
    pytest.importorskip("scripts.plot_curve", reason="this checkout has no wings")
    text = ending(SUMMARY, given(tmp_path, *GIVEN, checkpoints=(20, 60)))
    assert text.startswith("finished: held-out accuracy 0.098 -> 0.977 after 60 steps, in 198 s\n")
    shown = rows(text)
    assert shown["checkpoint"] == "runs/first/checkpoints/step_000060"
    assert (shown["curve"], shown["all files"]) == ("runs/first/curve.png", "runs/first")
    commands = {name: composed(shown[name]) for name in ("plot", "evaluate", "export", "serve", "train longer")}
    model = ["model=hf", "sizes=small", "model.path=runs/first"]
    task = ["recipe=gsm8k", "rollout.reward=gsm8k+0.1*format", "sessions.tool_parser=hermes"]
    assert commands == {
        "plot": ("curve", ["runs/first"]),
        "evaluate": ("evaluate", ["runs/first"]),
        "export": ("export", ["runs/first", "runs/first/exported"]),
        "serve": ("serve", [*task, *model]),
        "train longer": (
            "train",
            [one for one in GIVEN if "total_steps" not in one and "resume" not in one]
            + ["resume=runs/first", "trainer.total_steps=120"],
        ),
    }


def test_a_run_that_was_not_evaluated_says_so(tmp_path: Path) -> None:
    text = ending(SUMMARY | {"accuracy_before": None, "accuracy_after": None}, given(tmp_path, checkpoints=(60,)))
    assert text.startswith("finished: not evaluated, after 60 steps, in 198 s\n")
    assert composed(rows(text)["evaluate"]) == ("evaluate", ["runs/first", "data.val_files=FILES"])


def test_a_run_that_uploaded_nothing_names_the_command_that_makes_the_view_of_its_project(tmp_path: Path) -> None:
    pytest.importorskip("scripts.wandb_view", reason="this checkout has no wings")
    shown = rows(ending(SUMMARY, given(tmp_path), "math"))
    assert composed(shown["wandb view"]) == ("wandb-view", ["math"])
    assert "wandb view" not in rows(ending(SUMMARY, given(tmp_path / "online")))


def test_without_a_checkpoint_no_command_needs_one(tmp_path: Path) -> None:
    shown = rows(ending(SUMMARY, given(tmp_path)))
    assert shown["checkpoint"] == "none was saved (checkpoint.every=0)"
    assert set(shown) == {"checkpoint", "curve", "all files", "plot"}


@pytest.mark.parametrize(
    ("overrides", "checkpoints", "says", "expected"),
    [
        (GIVEN, (20, 40), "to go on from step 40", [*GIVEN[:-1], "hydra.run.dir=runs/first", "resume=auto"]),
        (GIVEN, (), "no checkpoint was saved yet", [*GIVEN]),
        (("resume=auto",), (), "no checkpoint was saved yet", ["hydra.run.dir=runs/first", "resume=auto"]),
    ],
)
def test_a_run_that_is_stopped_names_the_one_command_that_goes_on(
    tmp_path: Path, overrides: tuple[str, ...], checkpoints: tuple[int, ...], says: str, expected: list[str]
) -> None:
    head, how, command = stopped(given(tmp_path, *overrides, checkpoints=checkpoints)).splitlines()
    assert head == "stopped; what was logged is in runs/first" and says in how
    assert composed(command) == ("train", expected)


def test_a_run_that_is_stopped_before_its_first_checkpoint_keeps_the_folder_that_was_named(tmp_path: Path) -> None:
    """It holds records already, so only resume=auto starts there again."""
    line = replace(given(tmp_path, "seed=3"), names_folder=True)
    words = ["seed=3", "hydra.run.dir=runs/first", "resume=auto"]
    assert composed(stopped(line).splitlines()[-1]) == ("train", words)


def test_a_folder_with_blanks_and_backslashes_is_quoted_for_the_shell_and_for_hydra(tmp_path: Path) -> None:
    there = given(tmp_path / "my \\ru ns\\", checkpoints=(3,))
    line = CommandLine(
        run_dir=there.run_dir, overrides=(), sizes="tiny", python=tmp_path / ".venv/bin/python", folder=tmp_path / "x"
    )
    _, _, _, _, *words = shlex.split(stopped(line).splitlines()[-1])
    assert words[0].startswith('hydra.run.dir="') and words[1:] == ["resume=auto"]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        found = compose("train", overrides=words, return_hydra_config=True)
    assert found.hydra.run.dir == str(there.run_dir)
