"""How many tokens an engine computes again, counted where they are computed: in front of the worker's model runner.

vLLM's own counters do not tell: they leave out what is prefilled again after a preemption, which is how a KV cache that
was cleared is computed anew.

For scripts/bench_weight_sync.py.
"""

import re
from typing import Any

TRAJECTORY = re.compile(r"\d+-\d+")
"""A `RequestId` in an engine, without what its next part and vLLM add."""


class RecomputeMeter:
    """Counts tokens that are computed at places of a trajectory up to which it had been computed before."""

    def __init__(self) -> None:
        self.tokens = 0
        self._reached: dict[str, int] = {}

    def take(self, request_id: str, start: int, count: int) -> None:
        """`count` tokens are computed from place `start` on. Raises ValueError for a name that is not as TRAJECTORY."""
        found = TRAJECTORY.match(request_id)
        if found is None:
            raise ValueError(f"request {request_id}: its name does not begin like 0-31")
        reached, end = self._reached.get(found[0], 0), start + count
        self.tokens += max(min(end, reached) - start, 0)
        self._reached[found[0]] = max(end, reached)


def install_meter(worker: Any) -> None:
    """Runs in the worker's process."""
    runner, meter = worker.model_runner, RecomputeMeter()
    execute = runner.execute_model

    def execute_model(step: Any, *args: Any, **kwargs: Any) -> Any:
        cached = step.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        starts |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        for request_id, start in starts.items():
            meter.take(request_id, start, step.num_scheduled_tokens[request_id])
        return execute(step, *args, **kwargs)

    runner.execute_model, runner.recompute_meter = execute_model, meter


def read_meter(worker: Any) -> int:
    """Runs in the worker's process: tokens since the meter was installed."""
    return worker.model_runner.recompute_meter.tokens
