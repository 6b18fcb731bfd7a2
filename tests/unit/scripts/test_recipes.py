"""The shell scripts of the recipes, with a Python that only writes down how it was called."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.compose import resolve
from tests.support.paths import ROOT

RECIPES = {
    "gsm8k": ("gsm8k/train", "gsm8k/test"),
    "dapo_math": ("dapo_math/train", "aime_2024/test"),
    "search_r1": ("search_r1/train", "search_r1/test"),
}
PYTHON = """#!/bin/sh
printf '%s\\n' "$@" CALLED >>"$CALLS"
case "$2" in scripts.prepare_data) exit "$PREPARED" ;; esac
"""


def run(recipe: str, tmp_path: Path, *arguments: str, prepared: int = 0) -> tuple[int, list[list[str]], str]:
    """Returns the exit code, the arguments of each call of Python, and what is on stderr."""
    python, calls = tmp_path / "venv" / "bin" / "python", tmp_path / "calls"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    calls.write_text("")
    own = {"VIRTUAL_ENV": str(tmp_path / "venv"), "DATA": f"{tmp_path}/my data", "CALLS": str(calls)}
    done = subprocess.run(
        [ROOT / "scripts" / "recipes" / f"{recipe}.sh", *arguments],
        cwd=tmp_path,
        env=os.environ | own | {"PREPARED": str(prepared)},
        capture_output=True,
        text=True,
        check=False,
    )
    found = [call.splitlines() for call in calls.read_text().split("CALLED\n")[:-1]]
    return done.returncode, found, done.stderr


def with_data(tmp_path: Path) -> None:
    for path in (path for paths in RECIPES.values() for path in paths):
        file = tmp_path / "my data" / f"{path}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("arguments", [(), ("model=tiny",), ("rollout.max_staleness=1", "algorithm.group_size=3")])
def test_a_script_writes_out_what_its_recipe_says(recipe: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    with_data(tmp_path)
    code, [call], errors = run(recipe, tmp_path, *arguments)
    assert (code, errors, call[:3]) == (0, "", ["-m", "scripts.train", f"recipe={recipe}"])
    train, val = (f"{tmp_path}/my data/{path}.parquet" for path in RECIPES[recipe])
    files = [f'data.train_files="{train}"', f'data.val_files="{val}"']
    # The shell passes a path with a space as one argument, which Hydra's grammar takes without quotes.
    assert resolve(*call[2:]) == resolve(f"recipe={recipe}", *files, *arguments)


@pytest.mark.parametrize("recipe", RECIPES)
def test_data_that_is_missing_is_prepared_first(recipe: str, tmp_path: Path) -> None:
    code, calls, _ = run(recipe, tmp_path, "model=tiny")
    names = dict.fromkeys(path.split("/")[0] for path in RECIPES[recipe])
    folder = f"{tmp_path}/my data"
    assert calls[:-1] == [["-m", "scripts.prepare_data", name, "--folder", folder] for name in names]
    assert code == 0 and calls[-1][1] == "scripts.train"


def test_without_data_or_python_it_ends_and_says_what_to_do(tmp_path: Path) -> None:
    code, calls, errors = run("gsm8k", tmp_path, prepared=1)
    assert (code, len(calls)) == (1, 1)
    assert errors.startswith("gsm8k.sh: error: could not prepare gsm8k. Offline, fetch it elsewhere and run: ")
    environment = os.environ | {"VIRTUAL_ENV": str(tmp_path / "none")}
    script = ROOT / "scripts" / "recipes" / "gsm8k.sh"
    done = subprocess.run([script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and f"there is no {tmp_path}/none/bin/python: run 'make install' in" in done.stderr
