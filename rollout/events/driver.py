"""The driver's side of events: its own, and those of all other processes, on one clock."""

from collections.abc import Callable, Sequence

from rollout.events.clock import DriverClock, RemoteClock
from rollout.events.event import Event, Stamped
from rollout.events.kinds import ClockMeasured, EventsDropped, FleetEvent, Noticed, Report
from rollout.events.log import EventBatch

DRIVER = "driver"
Write = Callable[[Sequence[Stamped]], None]
"""Takes events to write. It returns at once and raises nothing."""


class DriverEvents:
    """Stamps the events of the driver, and those that other processes hand over, and gives them to a writer.

    Example:
        events = DriverEvents(writer.put)
        events.emit(UpdateStarted(global_steps=7))
        sent_at = events.clock()
        report = await replica.progress(known)
        events.take("replica-0", report.events, sent_at)
    """

    def __init__(
        self,
        write: Write,
        clock: Callable[[], float] | None = None,
        *,
        show: Callable[[str], None] = lambda text: None,
        is_on: bool = True,
    ):
        """Stamp events by a clock, and give them to a writer.

        `show` tells a person what a process has noticed. With `is_on` false (trainer.events=false), frequent events and
        those of other processes are ignored.
        """
        self._write = write
        self._show = show
        self.clock = clock or DriverClock()
        self.is_on = is_on
        self._clocks: dict[str, RemoteClock] = {}
        self._next: dict[str, int] = {}  # number of the event of each process that comes next
        self.num_lost = 0
        """Events that were lost on the way from other processes."""

    def emit(self, event: Event) -> None:
        if self.is_on or not event.is_frequent:
            self._write([Stamped(self.clock(), DRIVER, event)])

    def take(self, process: str, batch: EventBatch, sent_at: float) -> None:
        """Take the events of another process. `sent_at` is when the question was sent whose answer has just come."""
        if not self.is_on:
            return
        answered = self.clock()
        clock = self._clocks.setdefault(process, RemoteClock())
        stamped: list[Stamped] = []
        if clock.measure(sent_at=sent_at, remote=batch.now, answered=answered) and clock.offset is not None:
            measured = ClockMeasured(
                process=process, offset_s=clock.offset.seconds, error_s=round(clock.offset.error_s, 6)
            )
            stamped.append(Stamped(answered, DRIVER, measured))
        lost = batch.first - self._next.get(process, 0)
        if lost > 0:
            self.num_lost += lost
            dropped = EventsDropped(count=lost, total=self.num_lost, why="process")
            stamped.append(Stamped(answered, DRIVER, dropped))
        self._next[process] = batch.first + len(batch.events)
        pairs = zip(batch.times, batch.events, strict=True)
        stamped += [Stamped(clock.to_driver(time), process, event) for time, event in pairs]
        self._write(stamped)
        for event in batch.events:
            if isinstance(event, Noticed):
                self._show(f"{process}: {event.text}")

    def begins_anew(self, process: str) -> None:
        """Forget the clock and the numbers of a process: another one has its name from here on."""
        self._clocks.pop(process, None)
        self._next.pop(process, None)


def reporting(events: DriverEvents, show: Callable[[str], None]) -> Report:
    """Return a report of a fleet, which emits each of its events and gives its sentence to `show`."""

    def report(event: FleetEvent) -> None:
        show(event.text)
        events.emit(event)

    return report


NO_EVENTS = DriverEvents(lambda stamped: None, is_on=False)
"""The default of everything that takes events: it ignores all of them."""
