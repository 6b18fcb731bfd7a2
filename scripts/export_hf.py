"""Exports a checkpoint as a Hugging Face folder: `slipstream export CHECKPOINT OUT_DIR [--dtype bfloat16]`.

CHECKPOINT is a checkpoint (`runs/x/checkpoints/step_000020`), or a run folder, which stands for its newest good one.
The exported folder loads in transformers and in vLLM. The adapter of a run with model.lora.rank is merged into the
model that it was trained on; with --adapter, it is written alone, as PEFT has it.
"""

import argparse
import sys
from pathlib import Path

from trainer.checkpoint.store import Checkpoint, CheckpointError, checkpoint_at

DTYPES = ("float32", "bfloat16", "float16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run folder")
    parser.add_argument("out_dir", type=Path, help="a folder that does not exist")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="float32 is what is trained, bit for bit")
    parser.add_argument("--adapter", action="store_true", help="only the adapter, in PEFT's layout")
    parser.add_argument("--base", help="where the model lies that the adapter was trained on, if it has moved")
    options = parser.parse_args()
    if options.adapter and options.base:
        parser.error("--adapter needs no --base: nothing is merged")
    try:
        checkpoint = checkpoint_at(options.checkpoint)
        export(checkpoint, options.out_dir, options.dtype, base=options.base, adapter=options.adapter)
    except (CheckpointError, FileExistsError) as error:
        sys.exit(f"export_hf: {error}")
    what = "adapter" if options.adapter else "policy"
    sys.stdout.write(f"{options.out_dir}: the {what} after {checkpoint.global_steps} steps, from {checkpoint.path}\n")


def export(
    checkpoint: Checkpoint, out_dir: Path, dtype: str, *, base: str | None = None, adapter: bool = False
) -> None:
    """Write the policy, or only its adapter. See `trainer.worker.export.export_hf` for `base`."""
    import torch  # takes seconds: only after the arguments are checked

    from trainer.worker.export import export_adapter, export_hf

    torch_dtype = {name: getattr(torch, name) for name in DTYPES}[dtype]
    if adapter:
        export_adapter(checkpoint, out_dir, torch_dtype)
    else:
        export_hf(checkpoint, out_dir, torch_dtype, base)


if __name__ == "__main__":
    main()
