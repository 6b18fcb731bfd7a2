"""TRL's environment: our versions of the libraries that both sides use, and TRL."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.runtime.environment import REPO_ROOT
from scripts.bench.common import write_line

TRL = "trl>=1.16"
SAME_AS_OURS = ("torch", "transformers", "tokenizers", "numpy")
"""Pinned in TRL's environment to the versions of constraints.txt."""
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def ensure_environment(venv: Path) -> str:
    """Make TRL's environment unless it exists. Returns TRL's version."""
    python = venv / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--progress-bar", "off"]
    log = venv.with_suffix(".log")
    imports = [str(python), "-c", "import importlib.metadata as m, trl, torch; print(m.version('trl'))"]
    if not python.exists() or subprocess.run(imports, capture_output=True, check=False).returncode != 0:
        write_line(f"making TRL's environment in {venv} (some minutes; pip's log is {log})")
        venv.parent.mkdir(parents=True, exist_ok=True)
        pins = same_versions((REPO_ROOT / "constraints.txt").read_text())
        torch = next(pin for pin in pins if pin.startswith("torch=="))
        # CPU torch first and alone, as in install.sh: PyPI's build would bring gigabytes of CUDA.
        run_logged([sys.executable, "-m", "venv", "--clear", str(venv)], log)
        try:
            run_logged([*pip, "--no-deps", f"{torch}+cpu"], log)
        except RuntimeError:
            run_logged([*pip, "--no-deps", "--index-url", CPU_TORCH_INDEX, f"{torch}+cpu"], log)
        run_logged([*pip, TRL, *(pin for pin in pins if pin != torch)], log)
    return subprocess.run(imports, capture_output=True, check=True, text=True).stdout.strip()


def same_versions(constraints: str) -> list[str]:
    """Extract the pins of `SAME_AS_OURS`, as `name==version`."""
    pins = [line.split()[0] for line in constraints.splitlines() if "==" in line]
    return [pin for pin in pins if pin.partition("==")[0] in SAME_AS_OURS]


def run_logged(command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
    """Run the command in the repository root, with its output in `log`. Raises RuntimeError with the end of `log` when
    it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        code = subprocess.run(command, cwd=REPO_ROOT, env=environment, stdout=file, stderr=file, check=False).returncode
    if code != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{log.read_text()[-3000:]}")
