"""TensorBoard as a sink: event files, which `tensorboard --logdir` shows."""

import os
import socket
import time
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.tracking.samples import Histogram, StepSamples
from trainer.tracking.sinks import append_line

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

TENSORBOARD = "tensorboard"
"""Folder of the run folder."""
FILE_VERSION = "brain.Event:2"


class TensorboardSink:
    """Appends to one event file per process: a scalar for every metric, and the histograms of the step.

    A process that goes on from a checkpoint says so in its file: then TensorBoard leaves out what earlier files have
    of the steps after it.

    Example: TensorboardSink(run_dir / TENSORBOARD, first_step=21)
    """

    name = TENSORBOARD

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        """Raises ImportError where the package is missing. `first_step`: what earlier files have from it on is void."""
        import tensorboard.compat.proto.event_pb2  # here and below, because only a run with this sink needs it
        import tensorboard.summary.writer.record_writer  # noqa: F401  (now, and not in the first step)

        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / name
        self._first_step = first_step
        self._has_begun = False

    def log(self, step: int, metrics: Mapping[str, float], samples: StepSamples | None = None) -> None:
        """Append one event. It is in the file when this returns.

        Raises:
            OSError: it cannot be written. No part of it stays in the file, and the next call tries again.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()])
        for tag, histogram in ({} if samples is None else samples.histograms).items():
            summary.value.append(_histogram(tag, histogram))
        events = [] if self._has_begun else list(self._beginning())
        append_line(self._path, _records([*events, Event(wall_time=time.time(), step=step, summary=summary)]))
        self._has_begun = True

    def _beginning(self) -> "Iterator[Event]":
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        yield Event(wall_time=time.time(), file_version=FILE_VERSION)
        start = SessionLog(status=SessionLog.START)
        yield Event(wall_time=time.time(), step=self._first_step, session_log=start)

    def close(self, exit_code: int) -> None:
        """Do nothing: every event is written already."""


def _histogram(tag: str, histogram: Histogram) -> "Summary.Value":
    """TensorBoard's bins have only an upper edge, and the first one begins at `min`."""
    from tensorboard.compat.proto.histogram_pb2 import HistogramProto
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary.Value(
        tag=tag,
        histo=HistogramProto(
            min=histogram.edges[0],
            max=histogram.edges[-1],
            num=sum(histogram.counts),
            sum=histogram.total,
            sum_squares=histogram.total_squared,
            bucket_limit=histogram.edges[1:],
            bucket=histogram.counts,
        ),
    )


def _records(events: "list[Event]") -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    framed = BytesIO()
    writer = RecordWriter(framed)
    for event in events:
        writer.write(event.SerializeToString())
    return framed.getvalue()
