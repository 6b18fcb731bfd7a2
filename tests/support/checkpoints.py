"""The part of a checkpoint that train workers write, without train workers."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

from trainer.checkpoint.store import METADATA


def write_state(folder: Path, shards: Mapping[str, bytes]) -> None:
    """Write shards and the file that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in shards.items():
        (folder / name).write_bytes(data)
    entries = {name: SimpleNamespace(relative_path=name, offset=0, length=len(data)) for name, data in shards.items()}
    (folder / METADATA).write_bytes(pickle.dumps(SimpleNamespace(storage_data=entries)))
