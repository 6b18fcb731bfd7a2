"""TensorBoard as a sink: event files, which `tensorboard --logdir` shows."""

import os
import socket
import time
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from trainer.tracking.samples import Histogram, StepSamples
from trainer.tracking.sinks import append_line

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
        """Prepare to write. What earlier files have from `first_step` on is void. Raises ImportError if the package is
        missing."""
        # Here, because only a run with this sink needs the package, and all of it, because a step should not wait.
        from tensorboard.compat.proto import event_pb2, histogram_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = event_pb2  # their classes are made when they are imported
        self._summary: Any = summary_pb2
        self._histogram: Any = histogram_pb2
        self._make_writer = RecordWriter
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / name
        self._first_step = first_step
        self._has_begun = False

    def log(self, step: int, metrics: Mapping[str, float], samples: StepSamples | None = None) -> None:
        """Append one event. It is in the file when this returns.

        Raises:
            OSError: it cannot be written. No part of it stays in the file, and the next call tries again.
        """
        value = self._summary.Summary.Value
        values = [value(tag=tag, simple_value=number) for tag, number in metrics.items()]
        if samples is not None:
            values += [value(tag=tag, histo=self._histo(histogram)) for tag, histogram in samples.histograms.items()]
        event, events = self._event.Event, list[Any]()
        if not self._has_begun:
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            events.append(event(wall_time=time.time(), file_version=FILE_VERSION))
            events.append(event(wall_time=time.time(), step=self._first_step, session_log=start))
        events.append(event(wall_time=time.time(), step=step, summary=self._summary.Summary(value=values)))
        framed = BytesIO()  # each event with its length and checksums
        writer = self._make_writer(framed)
        for one in events:
            writer.write(one.SerializeToString())
        append_line(self._path, framed.getvalue())
        self._has_begun = True

    def _histo(self, histogram: Histogram) -> Any:
        """Return a histogram as TensorBoard has it: bins have only an upper edge, and the first begins at `min`."""
        return self._histogram.HistogramProto(
            min=histogram.edges[0],
            max=histogram.edges[-1],
            num=sum(histogram.counts),
            sum=histogram.total,
            sum_squares=histogram.total_squared,
            bucket_limit=histogram.edges[1:],
            bucket=histogram.counts,
        )

    def close(self, exit_code: int) -> None:
        """Do nothing: every event is written already."""
