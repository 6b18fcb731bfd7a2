"""The import name `slipstream`, as an installation has it: mapped by pyproject.toml into a folder."""

import os
import shutil
import tomllib
from pathlib import Path

from tests.support.paths import ROOT


def install_into(folder: Path) -> dict[str, str]:
    """Copy what pyproject.toml maps, and return the environment of a process that finds it, and this checkout."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    mapped = content["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for source, target in mapped.items():
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / source, folder / target)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
