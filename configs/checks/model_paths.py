"""Where a model is said to be: in a folder, or under a name on the hub."""

import re
from collections.abc import Iterator
from pathlib import Path

from configs.checkpoint import is_checkpoint
from configs.checks.problem import Problem
from configs.schema import Config

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""NAME or OWNER/NAME, as huggingface_hub takes them; which exist only the hub knows."""


def path_problems(config: Config, key: str, path: str) -> Iterator[Problem]:
    """`path`: the value of the key. The folders of a cluster that runs already may not be here."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not ((folder / "config.json").is_file() or is_checkpoint(folder)):
            yield Problem(key, "no Hugging Face model: the folder has no config.json; nor a checkpoint")
    elif config.ray.address is None and (path.startswith(".") or not HUB_NAME.fullmatch(path)):
        yield Problem(key, "no such folder, and no name of the hub, which would be NAME or OWNER/NAME")
