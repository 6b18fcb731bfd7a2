"""What an update costs when requests are kept, aborted and continued from their tokens, or kept with their KV computed
again."""

import asyncio
import logging
import time
from dataclasses import dataclass
from statistics import median

from configs.schema import InFlightKv, PauseMode, Staging, Transport
from scripts.bench.common import show_table
from scripts.bench.weight_sync.gaps import pause_window, tokens_within
from scripts.bench.weight_sync.host import NUM_REQUESTS, Arm, Host, all_running, settle, until

logger = logging.getLogger(__name__)

WINDOW = 10
"""Tokens are counted from the start of the update for this many times --seconds."""
WAYS = {
    "keep": (PauseMode.keep, InFlightKv.keep),
    "abort": (PauseMode.abort, InFlightKv.keep),
    "recompute": (PauseMode.keep, InFlightKv.recompute),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOutcome:
    """One update."""

    tokens_computed_again: int
    """Tokens that the engine's worker computed again in the window."""
    tokens_per_s: float
    """Tokens of all requests in the window, per second."""
    pause_s: float
    """Median over the requests."""


async def compare_keep_with_abort(host: Host, repeats: int) -> dict[str, list[KeepOutcome]]:
    arms = {name: Arm(host, Transport.shared_memory, Staging.host, *way) for name, way in WAYS.items()}
    outcomes: dict[str, list[KeepOutcome]] = {name: [] for name in WAYS}
    await host.engine.install_meter()
    for arm in arms.values():
        await arm.update()
    for repetition in range(repeats):
        for name, arm in arms.items():
            outcome = await _update_once(host, arm, f"{name}-{repetition}")
            outcomes[name].append(outcome)
            logger.info("%s: %.0f tokens/s", name, outcome.tokens_per_s)
    return outcomes


async def _update_once(host: Host, arm: Arm, name: str) -> KeepOutcome:
    from scripts.bench.weight_sync.engine import StreamedTrajectory

    streams = [StreamedTrajectory(host.engine, arm.replica, request) for request in host.requests(name, NUM_REQUESTS)]
    window_s = WINDOW * host.settle_s
    async with all_running(host, arm.replica, [stream.run() for stream in streams], NUM_REQUESTS) as tasks:
        begin, computed_again = time.perf_counter(), await host.engine.tokens_computed_again()
        await settle(host, streams[0].times, tasks)
        update = await arm.update()
        end = update.started + window_s
        await until(
            lambda: time.perf_counter() > end and all(stream.times[-1] > update.ended for stream in streams), tasks
        )
        computed_again = await host.engine.tokens_computed_again() - computed_again
    completions = await asyncio.gather(*tasks)
    first_tokens = [{span.global_steps: span.start for span in completion.spans} for completion in completions]
    calm = [(begin, update.started)]
    pauses = [
        pause_window(stream.times, first_token[update.version], update.swapped, calm).seconds
        for stream, first_token in zip(streams, first_tokens, strict=True)
    ]
    return KeepOutcome(
        tokens_computed_again=computed_again,
        tokens_per_s=tokens_within([stream.times for stream in streams], (update.started, end)) / window_s,
        pause_s=median(pauses),
    )


def show_keep(millions: int, window_s: float, outcomes: dict[str, list[KeepOutcome]]) -> dict[str, float]:
    rows, results = [], {}
    for name, of_way in outcomes.items():
        again = median(outcome.tokens_computed_again for outcome in of_way)
        tokens_per_s = median(outcome.tokens_per_s for outcome in of_way)
        pause_ms = 1e3 * median(outcome.pause_s for outcome in of_way)
        rows.append([name, f"{again:.0f}", f"{tokens_per_s:.0f}", f"{pause_ms:.1f}"])
        results[f"{name}_reprefill_tokens"] = again
        results[f"{name}_tokens_per_s"] = tokens_per_s
        results[f"{name}_pause_ms"] = pause_ms
    show_table(
        f"{millions}M parameters: an update with {NUM_REQUESTS} requests in flight, and {window_s:g} s from its start",
        ["requests", "computed again", "tokens/s", "pause ms"],
        rows,
    )
    return results
