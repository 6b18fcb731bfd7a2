"""`--help` shows what a command line leads to."""

from pathlib import Path

import pytest

from configs.cli.compose import compose_job
from configs.cli.help import COMMANDS, GROUPS, Help, find_section, first_sentence, list_options, sections
from configs.load import key_docs
from scripts.command.command import FAILED, Ended, Invocation, Main


def never(given: Invocation) -> Ended:
    raise AssertionError("help starts nothing")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str, command: str = "train") -> str:
    assert Main(name=command, command=never).run(arguments) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def test_a_section_has_the_values_of_the_recipe_and_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--help", "trainer", "recipe=gsm8k", "trainer.total_steps=7")
    assert "Values with recipe=gsm8k model=hf sizes=hf:" in text
    for line in ("trainer.total_steps = 7", "trainer.prompts_per_step = 64", "trainer.dtype = bfloat16"):
        assert f"\n{line}\n" in text
    assert "\ntrainer.prompts_per_step = 16\n" not in text
    assert {line.partition(" = ")[0] for line in text.splitlines() if line.startswith("trainer.")} == {
        key for key in key_docs() if find_section(key) == "trainer"
    }


def test_what_make_train_uses_is_shown_and_not_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert key_docs()["model.hidden_size"][0] == "64" and "\nmodel.hidden_size = 192\n" in shown(capsys, "-h", "model")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_overview_names_every_option_and_every_section(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "--help", "recipe=gsm8k", "model=tiny", command=command).splitlines()
    names = [line.lstrip(" *").split(maxsplit=1)[0] for line in lines if line.startswith("  ")]
    assert [option for group in GROUPS for option in list_options(group) if option not in names] == []
    assert [section for section in sections() if section not in names] == []
    chosen = ["gsm8k", *["tiny"] * (3 if command == "sft" else 2)]
    assert [line.split()[1] for line in lines if line.startswith("  * ")] == chosen
    assert max(map(len, lines)) <= 80 and len(lines) <= (64 if command == "sft" else 58)
    for group in ("recipe", "model"):
        abouts = [
            line.index(about[:9]) for about in list_options(group).values() for line in lines if about[:9] in line
        ]
        assert len(set(abouts)) == 1, "in one column"
    assert all(len(about) > 10 for group in GROUPS for about in list_options(group).values())


def test_a_key_and_a_group_are_topics_too(capsys: pytest.CaptureFixture[str]) -> None:
    key = shown(capsys, "--help", "data.train_files")
    assert key.startswith("data.train_files = null\n") and "generated word problems" in key
    assert "generated word problems" not in shown(capsys, "--help", "data")
    assert "* small " in shown(capsys, "--help", "sizes") and "* hf " in shown(capsys, "--help", "sizes", "model=hf")


def test_make_is_named_only_where_there_is_a_makefile(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed package has none."""
    monkeypatch.chdir(tmp_path)
    assert "make train" not in (text := shown(capsys, "--help")) and "slipstream train [KEY=VALUE ...]" in text
    (tmp_path / "Makefile").touch()
    assert 'make train ARGS="[KEY=VALUE ...]"' in shown(capsys, "--help")


def test_help_with_a_sweep_is_that_of_its_first_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\nseed = 3\n" in shown(capsys, "-m", "--help", "run", "seed=3,4")


def test_a_value_from_the_environment_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "secret")
    text = Help("train", compose_job("train", ["wandb.name=${oc.env:MINE}"])).of("wandb")
    assert 'wandb.name = "${oc.env:MINE}"' in text and "secret" not in text


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--help", "trainr"],
            "--help trainr: there is no such section, group or key; did you mean trainer or tracking?",
        ),
        (["trainer.lrr", "-h"], "--help trainer.lrr: there is no such section, group or key; did you mean trainer.lr "),
        (["--help", "zzz"], "there are run, model, data, "),
        (["--help", "trainer", "trainer.lr=abc"], "trainer.lr=abc: Value 'abc'"),
        (["--help", "trainer.learning_rate=1"], "TRL's learning_rate is trainer.lr here"),
        (["--help", "--cfg", "job"], "--help: takes a section, key=value and -m, not --cfg"),
    ],
)
def test_what_there_is_no_help_for_is_said_in_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Main(name="train", command=never).run(arguments) == FAILED
    said = capsys.readouterr().err
    assert said.startswith("config error: ") and line in said and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_first_sentence_ends_where_a_sentence_does() -> None:
    assert first_sentence("Divide by 0.5, as in Dr. GRPO. Then more.") == "Divide by 0.5, as in Dr. GRPO."
    assert first_sentence("avg@k of openai/gsm8k:main") == "avg@k of openai/gsm8k:main"
