"""vLLM's asynchronous scheduling on a CPU, where vLLM switches it off: this module stands in for CUDA in the worker.

Named as the worker extension, it is imported in the worker's process before the model runner is made. There the steps
are done when their calls return, so nothing has to be waited for; what is scheduled ahead of outputs is as on a GPU.
"""

from contextlib import nullcontext
from typing import Any

import torch

from weight_sync.receiver.vllm_receiver import WeightReceiver


class _Done:
    """A stream or an event, of work that is done already."""

    def __init__(self, **_options: Any):
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, _other: Any) -> None:
        pass


torch.cuda.Stream = torch.cuda.Event = _Done  # pyright: ignore
torch.cuda.current_stream = _Done  # pyright: ignore
torch.cuda.stream = nullcontext  # pyright: ignore


class AsyncReceiver(WeightReceiver):
    def runs_async(self) -> bool:
        runner: Any = self.model_runner  # pyright: ignore
        return runner.use_async_scheduling
