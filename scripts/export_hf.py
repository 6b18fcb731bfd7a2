"""Exports a checkpoint as a Hugging Face folder: `python -m scripts.export_hf CHECKPOINT OUT_DIR [--dtype bfloat16]`.

CHECKPOINT is a checkpoint (`runs/x/checkpoints/step_000020`), or a run folder, which stands for its newest good one.
The exported folder loads in transformers and in vLLM.
"""

import argparse
import logging
import sys
from pathlib import Path

from configs.checkpoint import CHECKPOINTS, MARKER
from trainer.checkpoint.store import Checkpoint, CheckpointError, CheckpointStore, verified

logger = logging.getLogger(__name__)
DTYPES = ("float32", "bfloat16", "float16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run folder")
    parser.add_argument("out_dir", type=Path, help="a folder that does not exist")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="float32 is what is trained, bit for bit")
    options = parser.parse_args()
    try:
        checkpoint = checkpoint_at(options.checkpoint)
        export(checkpoint, options.out_dir, options.dtype)
    except (CheckpointError, FileExistsError) as error:
        sys.exit(f"export_hf: {error}")
    sys.stdout.write(f"{options.out_dir}: the policy after {checkpoint.global_steps} steps, from {checkpoint.path}\n")


def checkpoint_at(path: Path) -> Checkpoint:
    """Return the checkpoint at `path`, or the newest good one of that run folder. Raises CheckpointError."""
    folder = path / CHECKPOINTS
    if (path / MARKER).exists() or not folder.is_dir():
        return verified(path)
    newest = CheckpointStore(folder).newest_good(logger.warning)
    if newest is None:
        raise CheckpointError(f"{folder} holds no good checkpoint")
    return newest


def export(checkpoint: Checkpoint, out_dir: Path, dtype: str) -> None:
    import torch  # takes seconds: only after the arguments are checked

    from trainer.worker.export import export_hf

    export_hf(checkpoint, out_dir, {name: getattr(torch, name) for name in DTYPES}[dtype])


if __name__ == "__main__":
    main()
