"""The command line says more than Hydra reads in it."""

from pathlib import Path

import pytest

from configs.cli.arguments import parse, parsed


@pytest.mark.parametrize("below", ["", "/checkpoints/step_000020"])
def test_the_newest_run_as_a_model_is_the_one_before_this(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that begins moves the link to itself."""
    (tmp_path / "runs" / "a run" / "checkpoints" / "step_000020").mkdir(parents=True)
    (tmp_path / "runs" / "latest").symlink_to("a run")
    monkeypatch.chdir(tmp_path)
    here, link = f"{tmp_path.resolve()}/runs/a run{below}", f"runs/latest{below}"
    given = parse([f"model.path={link}", f"+teacher.path={tmp_path}/{link}", "seed=1"])
    assert given.overrides == (f'model.path="{here}"', f'+teacher.path="{here}"', "seed=1")
    assert parse([f"model.path='{link}'"]).overrides == (f'model.path="{here}"',)
    swept = parse(["-m", f"model.path=gpt2,{link}"])
    assert swept.jobs() == [("model.path=gpt2",), (f'model.path="{here}"',)]
    others = (
        "model.path=runs/other",
        f"data.train_files={link}",
        "model.path=org/latest",
        "model.path='~nobody/latest'",
    )
    assert parse(others).overrides == others


PIPED = """agent 'a, b' "c" | tee $HOME/x; echo \\"d\\" {1,2}"""


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("claude -p {prompt} --model policy", ["claude -p {prompt} --model policy"]),
        (PIPED, [PIPED]),
        (""""my agent" "x\"""", [""""my agent" "x\""""]),
        ("'claude -p {prompt}'", ["claude -p {prompt}"]),
        ("'one {prompt}','two'", ["one {prompt}", "two"]),
        ("null", [None]),
    ],
)
@pytest.mark.parametrize("key", ["rollout.agent_command", "+data.sources.with-tools.rollout.agent_command"])
def test_a_command_of_the_shell_means_what_it_says(key: str, word: str, values: list[str | None]) -> None:
    jobs = parse(["-m", f"{key}={word}", "seed=1"]).jobs()
    read = [parsed(job)[0].value() for job in jobs]
    assert [getattr(value, "text", None) or value for value in read] == values
