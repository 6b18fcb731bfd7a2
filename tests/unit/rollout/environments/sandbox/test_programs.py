"""What a sandbox shows for a command: what its program needs, and no more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.environments.sandbox import staging
from rollout.environments.sandbox.programs import Shown, needed, outermost, shown_for, words_of
from rollout.environments.sandbox.staging import closed_folders


def executable(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with programs as npm, pipx, uv and a shell script leave them there."""
    executable(tmp_path / "npm/lib/node_modules/codex/bin/codex.js", "#!/usr/bin/env node\n")
    executable(tmp_path / "node/bin/node")
    (tmp_path / "npm/bin").mkdir()
    (tmp_path / "npm/bin/codex").symlink_to("../lib/node_modules/codex/bin/codex.js")
    (tmp_path / "npm/secret").touch()
    executable(tmp_path / "pythons/3.12.1/bin/python3.12")
    executable(tmp_path / "pythons/3.12.1/lib/python3.12/os.py")
    (tmp_path / "pythons/3.12").symlink_to("3.12.1")
    executable(tmp_path / "venvs/mini/bin/mini", f"#!{tmp_path}/venvs/mini/bin/python\n")
    (tmp_path / "venvs/mini/pyvenv.cfg").touch()
    (tmp_path / "venvs/mini/bin/python").symlink_to(tmp_path / "pythons/3.12/bin/python3.12")
    executable(tmp_path / "wrapper", "#!/bin/sh\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/mini").symlink_to(tmp_path / "venvs/mini/bin/mini")
    (tmp_path / "venv").symlink_to("venvs/mini")
    monkeypatch.setenv(
        "PATH", os.pathsep.join(f"{tmp_path}/{name}" for name in ("npm/bin", "node/bin", "bin")) + ":/bin"
    )
    return tmp_path


PYTHON = {"pythons/3.12": None, "pythons/3.12.1": None}
CASES = {
    "codex exec {prompt}": {
        "npm/bin/codex": "npm/lib/node_modules/codex/bin/codex.js",
        "npm/lib/node_modules": None,
        "node/bin/node": None,
    },
    "timeout 5 mini --task {prompt}": {"bin/mini": "venvs/mini/bin/mini", "venvs/mini": None, **PYTHON},
    "cat x | HOME/venv/bin/python HOME/my_agent.py && echo done": {"venv": None, "my_agent.py": None, **PYTHON},
    "sh -c 'exit 1'": {},
    "HOME/wrapper": {"wrapper": None},
}


@pytest.mark.parametrize("command", CASES)
def test_the_links_packages_and_interpreter_of_the_words_are_shown(command: str, home: Path) -> None:
    (home / "my_agent.py").touch()
    expected = {Shown(f"{home}/{path}", link and f"{home}/{link}") for path, link in CASES[command].items()}
    assert set(shown_for(command.replace("HOME", str(home)), ())) == expected


def test_folders_are_shown_besides_and_what_is_in_them_once(home: Path) -> None:
    assert shown_for("codex", [str(home)]) == [Shown(str(home))]
    assert outermost([Shown("/a", "/b"), Shown("/a/c"), Shown("/ab"), Shown("/ab/d")]) == [
        *(Shown("/a", "/b"), Shown("/a/c"), Shown("/ab"))
    ]
    assert Shown(f"{home}/venv").words == ("--ro-bind", f"{home}/venvs/mini", f"{home}/venv")


def test_links_in_a_circle_and_quotes_that_only_a_shell_understands_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert shown_for(f"{tmp_path}/a", ()) == []
    assert {each.path for each in needed(tmp_path / "gone")} == {f"{tmp_path}/gone"}
    assert words_of("X=1 a 'b c';d&&e") == ["X=1", "a", "b c", ";", "d", "&&", "e"]
    assert words_of("echo it's") == ["echo", "it's"]


def test_the_outermost_folder_that_only_its_owner_may_enter_is_found(tmp_path: Path) -> None:
    (tmp_path / "open" / "closed" / "closed").mkdir(parents=True)
    for path in (tmp_path, *tmp_path.parents):  # pytest's own folders are closed, too
        if path.stat().st_uid == os.getuid() and not path.stat().st_mode & 1:
            path.chmod(0o755)
    for path in (tmp_path / "open" / "closed", tmp_path / "open" / "closed" / "closed"):
        path.chmod(0o700)
    inside, closed = f"{tmp_path}/open/closed/closed/file", f"{tmp_path}/open/closed"
    assert closed_folders([inside, f"{tmp_path}/open/file", closed], user=os.getuid() + 1) == [closed]
    assert closed_folders([inside], user=os.getuid()) == [], "its owner may"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root covers folders")
def test_a_program_starts_though_the_modules_of_python_are_out_of_sight() -> None:
    """As they are where Python is below /root, which only root may enter."""
    shown = f"{sys.base_prefix}/bin"
    words = [sys.executable, "-I", "-S", staging.__file__, json.dumps([shown]), "65534", "ls", shown]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    if "may mount nothing" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0 and "python3" in done.stdout.split(), done.stderr
