"""How long an update pauses an engine, measured by a client that streams one request."""

import asyncio
import logging
from dataclasses import dataclass, field
from statistics import median

from configs.schema import Staging, Transport
from scripts.bench.common import median_ratio, show_table
from scripts.bench.weight_sync.gaps import PauseWindow, median_window, pause_window
from scripts.bench.weight_sync.host import NUM_REQUESTS, Arm, Host, Update, all_running, settle

logger = logging.getLogger(__name__)

ARMS = {
    f"{place}, {transport.value}": (transport, staging)
    for transport in (Transport.shared_memory, Transport.collective)
    for place, staging in (("staged", Staging.host), ("inside", Staging.none))
}
STAGED, ADAPTER = "staged, shared_memory", "adapter, shared_memory"
NAMES = (*ARMS, ADAPTER)
QUIET_ROUNDS = 3


@dataclass(slots=True)
class PauseResults:
    """Measurements of one size: an item per repetition, of `windows` one per update in each, of `updates` one each."""

    nbytes: int = 0
    floor_s: list[float] = field(default_factory=list)
    publish_over_memcpy: list[float] = field(default_factory=list)
    windows: dict[str, list[list[PauseWindow]]] = field(default_factory=lambda: {name: [] for name in NAMES})
    updates: dict[str, list[Update]] = field(default_factory=lambda: {name: [] for name in NAMES})

    def pauses(self, arm: str) -> list[float]:
        """Median of each repetition, in seconds."""
        return [median(window.seconds for window in windows) for windows in self.windows[arm]]

    def over_floor(self, arm: str) -> float:
        return median_ratio(self.pauses(arm), self.floor_s)

    def adapter_over_full(self) -> float:
        return median_ratio(self.pauses(ADAPTER), self.pauses(STAGED))

    def adapter_bytes_over_full(self) -> float:
        return max(update.report.nbytes for update in self.updates[ADAPTER]) / self.nbytes

    def inside_over_staged(self, transport: Transport) -> float:
        return median_ratio(self.pauses(f"inside, {transport.value}"), self.pauses(f"staged, {transport.value}"))


async def measure_pauses(host: Host, repeats: int) -> PauseResults:
    results = PauseResults(nbytes=host.nbytes)
    arms = {name: Arm(host, *arm) for name, arm in ARMS.items()}
    assert host.adapter is not None
    arms[ADAPTER] = Arm(host, *ARMS[STAGED], publisher=host.adapter)
    for arm in arms.values():  # the first update of an arm allocates memory, or connects
        await arm.update()
    for repetition in range(repeats):
        _measure_quiet(host, results)
        updates = await _measure_updates(host, arms, repetition, results)
        for name, update in updates:
            results.updates[name].append(update)
        found = ", ".join(f"{name} {1e3 * results.pauses(name)[-1]:.1f}" for name in arms)
        where = f"{host.size.millions}M, repetition {repetition}"
        logger.info("%s: pauses in ms: floor %.1f, %s", where, 1e3 * results.floor_s[-1], found)
    return results


def _measure_quiet(host: Host, results: PauseResults) -> None:
    """Measure memcpy and publication while the engine is idle."""
    publisher = host.publishers[Transport.shared_memory]
    floor, memcpy, publish = [], [], []
    for _ in range(QUIET_ROUNDS):
        floor.append(host.floor.seconds())
        memcpy.append(host.memcpy.seconds())
        publish.append(publisher.publish_seconds(host.next_version()))
    results.floor_s.append(median(floor))
    results.publish_over_memcpy.append(median(memcpy) / median(publish))


async def _measure_updates(
    host: Host, arms: dict[str, Arm], repetition: int, results: PauseResults
) -> list[tuple[str, Update]]:
    """Update by all arms in turns while the same requests are in flight. Each round begins with another arm: what one
    leaves in caches and allocators meets another one after it."""
    from scripts.bench.weight_sync.engine import StreamedTrajectory

    replica = next(iter(arms.values())).replica
    first, *others = host.requests(f"pause-{repetition}", NUM_REQUESTS + 1)
    probe = StreamedTrajectory(host.engine, replica, first)
    updates: list[tuple[str, Update]] = []
    runs = [probe.run(), replica.generate_group(others)]
    async with all_running(host, replica, runs, NUM_REQUESTS + 1) as tasks:
        begin = probe.times[-1]
        await settle(host, probe.times, tasks)
        for turn in range(host.size.rounds):
            first_arm = (repetition * host.size.rounds + turn) % len(arms)
            for name in [*arms][first_arm:] + [*arms][:first_arm]:
                updates.append((name, await arms[name].update()))
                await settle(host, probe.times, tasks)
    completion, _ = await asyncio.gather(*tasks)
    first_token = {span.global_steps: span.start for span in completion.spans}
    ends = [begin, *(update.ended for _, update in updates)]
    starts = [*(update.started for _, update in updates), probe.times[-1]]
    calm = list(zip(ends, starts, strict=True))
    for of_arm in results.windows.values():
        of_arm.append([])
    for index, (name, update) in enumerate(updates):
        window = pause_window(probe.times, first_token[update.version], update.swapped, calm[index : index + 2])
        results.windows[name][-1].append(window)
    return updates


HEADER = ["arm", "pause", "from", "to", "/ floor", "stop", "swap", "go", "gap", "frozen", "stage", "publish", "update"]


def show_pauses(millions: int, results: PauseResults) -> None:
    rows = []
    for name in NAMES:
        windows = [window for of_repetition in results.windows[name] for window in of_repetition]
        reports = [update.report for update in results.updates[name]]
        parts, pauses = median_window(windows), [window.seconds for window in windows]
        seconds = [parts.stop_s, parts.swap_s, parts.go_s, parts.normal_s]
        seconds += [median(report.replicas[0].pause_s for report in reports)]
        seconds += [median(report.replicas[0].stage_s for report in reports)]
        seconds += [median(report.publish_s for report in reports), median(report.total_s for report in reports)]
        spread = [_ms(median(pauses)), _ms(min(pauses)), _ms(max(pauses)), f"{results.over_floor(name):.2f}"]
        rows.append([name, *spread, *map(_ms, seconds)])
    floor_s = median(results.floor_s)
    title = (
        f"{millions}M parameters, {results.nbytes / 1e6:.0f} MB: the pause in ms, of {len(pauses)} updates each; floor "
        f"{_ms(floor_s)} ms ({results.nbytes / floor_s / 1e9:.1f} GB/s), publish / memcpy throughput "
        f"{median(results.publish_over_memcpy):.2f}"
    )
    show_table(title, HEADER, rows)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"
