"""The part of a checkpoint that train workers write, without train workers."""

import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace

from trainer.checkpoint.store import METADATA


def write_state(folder: Path, shards: Mapping[str, bytes], names: Collection[str] = ()) -> None:
    """Write shards and the file that names them, and the tensors in them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in shards.items():
        (folder / name).write_bytes(data)
    entries = {name: SimpleNamespace(relative_path=name, offset=0, length=len(data)) for name, data in shards.items()}
    content = SimpleNamespace(storage_data=entries, state_dict_metadata=dict.fromkeys(names))
    (folder / METADATA).write_bytes(pickle.dumps(content))
