"""Shell scripts are read, and never run."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.migrate.settings import Setting, Unknown, typed
from scripts.migrate.shell import Shell, options_of, overrides_of, unread_words


def commands(text: str) -> list[list[str]]:
    shell = Shell()
    shell.read(text)
    return shell.commands


@pytest.mark.parametrize(
    ("script", "word"),
    [
        ("n=8\nrun a.b=$n", "a.b=8"),
        ("run a.b=${n:-4}", "a.b=4"),
        ("n=8\nrun a.b=${n:-4}", "a.b=8"),
        ("n=${1:-16}\nrun a.b=$n", "a.b=16"),
        ('export DATA=$HOME/data\nrun a.b="${DATA}/x.parquet"', "a.b=~/data/x.parquet"),
        ("p=2048\nr=$((1024 * 8))\nrun a.b=$((p + r))", "a.b=10240"),
        ("run 'a.b=$n'", "a.b=$n"),
        ("run a.b=\"['x','y']\"", "a.b=['x','y']"),
        ("run a.b=1 # a.b=2", "a.b=1"),
        ("run \\\n  a.b=1 \\\n  c=2", "a.b=1"),
        ("X=1 Y=2 run a.b=3", "a.b=3"),
        ('args=(\n  a.b=5  # five\n  c=6\n)\nrun "${args[@]}" "$@"', "a.b=5"),
        ("args=(c=1)\nargs+=(a.b=7)\nrun ${args[@]}", "a.b=7"),
        ("mkdir -p x && run a.b=8 | tee log", "a.b=8"),
        ("n=4\nm=1; n=9\nrun a.b=$n", "a.b=9"),
        ("n=4\nset -x; n=10  # don't; n=5\nrun a.b=$n", "a.b=10"),
        ("n=4\nexport m=1 n=11\nrun a.b=$n", "a.b=11"),
        ("n='1;2'; run a.b=$n", "a.b=1;2"),
    ],
)
def test_a_word_has_the_values_that_the_shell_would_give_it(script: str, word: str) -> None:
    (command,) = [words for words in commands(script) if "run" in words]
    assert word in command


def test_what_only_running_tells_is_unknown_and_nothing_is_run(tmp_path: Path) -> None:
    file = tmp_path / "made"
    script = f"n=$(touch {file} && nproc)\nrun a.b=$n c.d=`touch {file}` e.f=$NOT_SET g.h=x${{NOT_SET}}y"
    (command,) = [words for words in commands(script) if "run" in words]
    assert [setting.value for setting in overrides_of(command)] == [
        Unknown(f"$(touch {file} && nproc)"),
        Unknown(f"`touch {file}`"),
        Unknown("$NOT_SET"),
        Unknown("x$NOT_SETy"),
    ]
    assert not file.exists()


@pytest.mark.parametrize(
    "redirection", ["> log.txt", ">log.txt", "2>&1 | tee log", "&> log", ">> 'a log' 2>/dev/null", "> >(tee log) < in"]
)
def test_where_the_output_of_a_command_goes_is_no_word_of_it(redirection: str) -> None:
    expected = ["run", "--sep", ">", "--steps", "8"]
    assert commands(f"run --sep '>' --steps 8 {redirection}")[0] == expected
    assert commands(f"run --sep '>' {redirection.removesuffix(' | tee log')} --steps 8")[0] == expected


def test_what_a_condition_of_one_line_sets_is_not_taken_for_granted() -> None:
    for line in ("[ -z $X ] && n=8", "if [ $X ]; then n=8; fi", "if [ $X ]; then m=1; n=8; fi"):
        shell = Shell()
        shell.read(f"n=4\n{line}\nrun a.b=$n")
        assert "n" in shell.doubts


def test_overrides_lose_the_signs_of_hydra_and_options_their_dashes() -> None:
    assert overrides_of(["python", "+a.b=1", "++c=[x, y]", "~d", "--e=3"]) == [
        Setting("a.b", 1),
        Setting("c", ["x", "y"]),
    ]
    options = ["trl", "grpo", "--learning-rate", "1e-6", "--use_vllm", "--report_to", "wandb", "tensorboard", "--a=b"]
    assert options_of(options) == [
        Setting("learning_rate", 1e-6),
        Setting("use_vllm", True),
        Setting("report_to", ["wandb", "tensorboard"]),
        Setting("a", "b"),
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-6", 1e-6), ("0.", 0.0), ("-1", -1), ("True", True), ("false", False), ("null", None), ("None", None)]
    + [("token-mean", "token-mean"), ("['a','b']", ["a", "b"]), ("a: b", "a: b"), ("nan", "nan"), ("[x", "[x")],
)
def test_a_text_has_the_type_that_it_has_on_their_command_lines(text: str, value: object) -> None:
    assert typed(text) == value and type(typed(text)) is type(value)


@given(st.text(alphabet="ab$\"'\\{}()[]=#`@:-+ \n;|&<>1", max_size=60))
def test_any_text_is_read_to_its_end(text: str) -> None:
    for command in commands(text):
        overrides_of(command), options_of(command), unread_words(command)
