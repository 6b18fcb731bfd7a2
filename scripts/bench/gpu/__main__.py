"""Checks this project on one GPU, without a network, in less than nine minutes a call: `make gpu-check`.

python -m scripts.bench.gpu [--folder FOLDER] [--only PART ...] [--budget-s 510] [--dry-run]

Every part leaves its figures in FOLDER/PART.json and its output in FOLDER/PART.log. A second call with the same folder
goes on: it runs what is not done. A part begins only when its deadline fits in what is left of the budget, and one that
fails does not keep the others from running.

- `tests`: tests/gpu.
- `updates_small`, `updates_0.5b`, `updates_1.5b`, `updates_7b`: a vLLM engine with requests in flight and random
  bfloat16 weights of that many parameters (Qwen2's shapes, made on the GPU, nothing is read or downloaded), updated
  under a keep pause over cuda_ipc and, where /dev/shm has room, shared_memory, staged in host memory and on the device.
  Every token's version is checked against the updates.
    tokens_per_s               of all requests, between updates
    <staging>_<transport>_pause_ms, _over_floor, _gb_per_s
                               median pause of a streamed request; over the time of one copy of as many bytes (from
                               pinned host memory, or within the device); the weights' bytes per second of the pause
- `adapter_1.5b`: the same over one transport, and by turns an adapter of rank 32 that the engine merges: sent_mb,
  update_s and pause_ms of each, and adapter_pause_over_full.
- `trainer_0.5b`, `trainer_1.5b`, `trainer_7b`: optimizer steps of one FSDP rank on full rows of sequences end to end,
  without generation; of 7B parameters forward and backward only, since AdamW's state does not fit on the GPU:
  tokens_per_s, and mfu (6 x parameters and attention, over the dense bfloat16 peak).
- `attention`: forward and backward of 0.5B parameters over some sessions, as a tree and end to end, by dense, flex
  and varlen attention: ms, over_dense (dense over it), and how far logprobs and a gradient are from those of dense.
- `logprobs`: of 16k tokens at a vocabulary of 152k, in chunks that are reduced at once (fused) and in checkpointed
  chunks of logits: seconds, gb, speedup, gradient_gap.
- `loading_7b`: a rank reads 7B parameters from files: seconds, gb_per_s, and peaks of host and device besides its rows.
  It fails where the device held more than a layer besides them.
- `speculation`: greedy answers of random weights, which repeat themselves, with drafts by n-grams and without:
  tokens_per_s of both, ngram_over_plain, ngram_acceptance.
- `shared_gpu`: a short run with trainer and replica on the GPU (gpu_share=0.5) and weights over CUDA IPC.
- `asynchrony`: samples/s of the same short job with max_staleness=2 over 0, both on the GPU.
- `recipe`: `make train`, both on the GPU.

Before the last line comes a table in Markdown; the last line is JSON: "PART.FIGURE", outcomes, errors, machine. Exit
code: 1 when a part failed. With --dry-run all parts run on a CPU with small sizes, and their figures say nothing.
"""

import argparse
import logging
import sys
from pathlib import Path

from scripts.bench.common import write_json, write_line
from scripts.bench.gpu.outcome import Outcome, Setting
from scripts.bench.gpu.parts import PARTS
from scripts.bench.gpu.report import last_line, markdown
from scripts.bench.gpu.runner import part_command, run_here, run_parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/gpu_check"), help="where figures and logs are kept")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="parts, instead of all")
    parser.add_argument("--budget-s", type=float, default=510.0, help="seconds of this call")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, small, to see that it runs")
    parser.add_argument("--here", choices=list(PARTS), help="run one part in this process")
    options = parser.parse_args()
    setting = Setting(folder=options.folder.resolve(), dry_run=options.dry_run)
    if options.here is not None:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        run_here(options.here, PARTS[options.here], setting)
        return
    parts = {name: part for name, part in PARTS.items() if name in options.only}
    records = run_parts(parts, setting, options.budget_s, part_command(setting))
    write_line(markdown(records))
    write_json(last_line(records, setting.device))
    sys.exit(any(record.outcome is Outcome.failed for record in records))


if __name__ == "__main__":
    main()
