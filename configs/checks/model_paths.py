"""Where a model is said to be: in a folder, or under a name on the hub."""

import re
from collections.abc import Iterator
from pathlib import Path

from configs.checkpoint import LATEST, is_checkpoint
from configs.checks.problem import Problem
from configs.schema import Config

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""NAME or OWNER/NAME, as huggingface_hub takes them; which exist only the hub knows."""
NO_FOLDER = "no such folder, and no name of the hub, which would be NAME or OWNER/NAME"


def path_problems(config: Config, key: str, path: str, *, may_be_checkpoint: bool = True) -> Iterator[Problem]:
    """`path`: the value of the key. The folders of a cluster that runs already may not be here."""
    try:
        folder = Path(path).expanduser()
    except RuntimeError:  # ~nobody
        yield Problem(key, NO_FOLDER)
        return
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return
        if not is_checkpoint(folder):
            yield Problem(key, "no Hugging Face model: the folder has no config.json; nor a checkpoint")
        elif not may_be_checkpoint:
            yield Problem(key, "must be a Hugging Face model, not a checkpoint: scripts.export_hf makes one of it")
    elif config.ray.address is None and not _may_be_hub_name(path, folder):
        yield Problem(key, NO_FOLDER)


def _may_be_hub_name(path: str, folder: Path) -> bool:
    """Not one like runs/another, where runs has the folders of runs."""
    return not path.startswith(".") and bool(HUB_NAME.fullmatch(path)) and not (folder.parent / LATEST).is_symlink()
