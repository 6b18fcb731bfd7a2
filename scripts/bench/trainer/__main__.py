"""What a train worker's own parts cost.

python -m scripts.bench.trainer [--repeats 3] [--tokens 4096] [--vocabulary 151936] [--hidden 896] [--threads 1]

- `logprobs`: logprobs and entropies of random hidden states, forward and backward in float32 on the CPU: by
  `trainer/worker/token_logprobs.py` (fused), and from logits in chunks of 2^27 that are checkpointed, by turns. `tiny`
  is the same for a micro-batch of the default run's model, whose logits are one chunk. Memory is counted: the bytes of
  tensors that are alive at once, gradients included, and hidden states and weight not. For it everything runs once
  more on torch's `meta` device, where tensors have sizes only; dense is all logits at once.
- `packing`: forward and backward of a model of 3 layers of width 256 over 32 sequences, whose lengths are log-normal:
  end to end in rows of 2,048 tokens (packed), and a row for each, sorted by length and padded (rows), by turns. Tokens
  are those of the sequences, seconds those of the process on its core.

The last line of the output is JSON, with medians over the repetitions:

    logprobs_seconds_checkpointed, logprobs_seconds_fused
    logprobs_speedup, logprobs_speedup_tiny     seconds checkpointed over fused, of neighbouring runs
    logprobs_gb_dense, logprobs_gb_checkpointed, logprobs_gb_fused
    logprobs_memory_over_dense                  fused over dense
    logprobs_difference_ppm                     of the gradients, in millionths of them
    packing_tokens_per_s_packed, packing_tokens_per_s_rows
    packing_padding_share_packed, packing_padding_share_rows
    packing_speedup                             seconds of rows over packed, of neighbouring runs
    packing_logprob_difference                  largest, in nats
"""

import argparse
import asyncio

import torch

from scripts.bench.common import write_json
from scripts.bench.trainer.logprobs import TINY, Shape, measure
from scripts.bench.trainer.packing import PackingShape, measure_packing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = Shape()
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of everything, interleaved")
    parser.add_argument("--tokens", type=int, default=shape.tokens)
    parser.add_argument("--vocabulary", type=int, default=shape.vocabulary)
    parser.add_argument("--hidden", type=int, default=shape.hidden, help="width of the hidden states")
    parser.add_argument("--threads", type=int, default=1, help="of torch; a train worker on CPU has one")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = Shape(tokens=options.tokens, vocabulary=options.vocabulary, hidden=options.hidden)
    logprobs = asyncio.run(measure(shape, TINY, options.repeats))
    packing = asyncio.run(measure_packing(PackingShape(), options.repeats))
    write_json(logprobs | packing | {"repeats": options.repeats})


if __name__ == "__main__":
    main()
