"""What a command line says, beyond what Hydra reads in it."""

from pathlib import Path

import pytest

from configs.cli.arguments import parse


@pytest.mark.parametrize("below", ["", "/checkpoints/step_000020"])
def test_the_newest_run_as_a_model_is_the_one_before_this(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that begins moves the link to itself."""
    (tmp_path / "runs" / "a run" / "checkpoints" / "step_000020").mkdir(parents=True)
    (tmp_path / "runs" / "latest").symlink_to("a run")
    monkeypatch.chdir(tmp_path)
    here = f"{tmp_path.resolve()}/runs/a run{below}"
    given = parse([f"model.path=runs/latest{below}", f"+teacher.path={tmp_path}/runs/latest{below}", "seed=1"])
    assert given.overrides == (f'model.path="{here}"', f'+teacher.path="{here}"', "seed=1")
    others = ("model.path=runs/other", "data.train_files=runs/latest", "model.path=org/latest", "model.path=")
    assert parse(others).overrides == others
