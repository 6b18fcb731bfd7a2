"""Counts the tokens that an engine computes again, in front of the worker's model runner.

vLLM's own counters leave out what is prefilled again after a preemption, and a cleared KV cache is recomputed in that
way.
"""

import re
from typing import Any

TRAJECTORY = re.compile(r"\d+-\d+")
"""Beginning of a request's name in the engine, without the suffixes of a continuation and of vLLM."""


class RecomputeMeter:
    """Counts tokens computed at positions of a trajectory that had been computed before."""

    def __init__(self) -> None:
        self.tokens = 0
        self._reached: dict[str, int] = {}

    def take(self, request_id: str, start: int, count: int) -> None:
        """Record that `count` tokens are computed from position `start`. Raises ValueError for a name that TRAJECTORY
        does not match."""
        found = TRAJECTORY.match(request_id)
        if found is None:
            raise ValueError(f"request {request_id}: its name does not begin like 0-31")
        reached, end = self._reached.get(found[0], 0), start + count
        self.tokens += max(min(end, reached) - start, 0)
        self._reached[found[0]] = max(end, reached)


def install_meter(worker: Any) -> None:
    """Wrap the worker's model runner; runs in its process."""
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
    """Return the tokens since the meter was installed; runs in the worker's process."""
    return worker.model_runner.recompute_meter.tokens
