"""The log-probabilities of given tokens: vLLM's prompt logprobs.

Facts this rests on (vLLM 0.26 to 0.33):
- They are of the model's own distribution: temperature, top-p and top-k of a request do not touch its prompt.
- A request that asks for them reads nothing of the prefix cache, whose blocks hold no logits.
- A step computes the logits of all prompt tokens that it reads, in float32, beside what memory vLLM has profiled.
  `max_num_batched_tokens` bounds them.
- With prompt_logprobs=0 only the logprob of the token that is there leaves the worker, and no top k.
- A request cannot end with its prompt: one token is sampled, which nobody reads.
"""

from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from rollout.engines.base import EngineDiedError
from rollout.engines.vllm.client import GatedLLM
from rollout.types import FloatArray, IntArray


async def score(llm: GatedLLM, token_ids: IntArray, name: str) -> FloatArray:
    """See `Engine.score`."""
    prompt: Any = {"type": "token", "prompt_token_ids": token_ids.tolist()}
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )
    final: RequestOutput | None = None
    try:
        async for output in llm.generate(prompt, params, name):
            final = output
    except EngineDeadError as error:
        raise EngineDiedError("the vLLM engine core died") from error
    assert final is not None and final.finished
    if final.outputs[0].finish_reason == "abort":
        raise RuntimeError(f"the scoring {name} was aborted")
    found = final.prompt_logprobs
    assert isinstance(found, FlatLogprobs) and len(found.logprobs) == len(token_ids) - 1
    return np.asarray(found.logprobs, np.float32)
