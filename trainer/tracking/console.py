"""The progress of a run on the screen: a live rich panel in a terminal, one plain line per step anywhere else."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.console import Console as Target

from trainer.tracking.live_console import LiveConsole, ReplicaView, formatter, is_supervised
from trainer.tracking.progress import Progress, duration

READER_IS_GONE = (errno.EPIPE, errno.EIO)
"""The errors of a pipe and of a terminal whose other end is gone. Other errors of writing may pass."""


class PlainConsole:
    """Writes one line per step, evaluation, stage and message. A full disk under a redirected output loses lines, and
    so does the end of what reads a pipe: neither is a reason to end a training."""

    def __init__(self, total_steps: int, stream: TextIO, progress: Progress | None = None) -> None:
        self._progress = progress or Progress(total_steps=total_steps)
        self._stream = stream
        self._stage = ""

    def stage(self, text: str) -> None:
        """Show what the run does now, until the next stage."""
        if text != self._stage:
            self._stage = text
            self._timed(text)

    @contextmanager
    def during(self, text: str) -> Iterator[Callable[[str], None]]:
        """Show what goes on beside the stage while the block runs. Yields what says how far that is."""
        self._timed(text)
        activity = self._progress.begin(text)
        yield lambda detail: self._timed(f"{text}: {detail}")
        self._timed(f"{text}: done in {duration(self._progress.end(activity))}")

    def watch(self, replicas: Callable[[], Sequence[ReplicaView]]) -> None:
        """Show the replicas from now on, unless messages say what becomes of them. `replicas` is cheap, and may be
        called from another thread."""

    def resumed(self, global_steps: int, accuracies: Sequence[tuple[int, float]]) -> None:
        """Go on from a checkpoint of `global_steps`, with the (global_steps, accuracy) of the evaluations before it."""
        self._progress.continue_from(global_steps, accuracies)

    def step(self, global_steps: int, metrics: Mapping[str, float]) -> None:
        self._progress.take_step(global_steps)
        fields = (
            f"step {self._position(global_steps)}",
            *(_supervised(metrics) if is_supervised(metrics) else self._rollout_fields(metrics)),
            f"{formatter(metrics)('timing_s/step', '.2f')} s",
            f"eta {duration(self._progress.remaining_s())}",
        )
        self.message("  ".join(fields))

    def _rollout_fields(self, metrics: Mapping[str, float]) -> Iterator[str]:
        show, accuracies = formatter(metrics), self._progress.accuracies
        yield f"reward {show('critic/rewards/mean', '.2f')}"
        yield f"acc {f'{accuracies[-1][1]:.2f}' if accuracies else '-'}"
        yield f"loss {show('actor/pg_loss', 'z.3f')}"
        if "actor/ce_loss" in metrics:
            yield f"ce {show('actor/ce_loss', '.3f')}"
        yield f"kl {show('actor/rollout_kl', 'z.4f')}"
        yield f"entropy {show('actor/entropy', '.2f')}"
        yield f"grad {show('actor/grad_norm', '.2f')}"
        yield f"length {show('response_length/mean', '.0f')}"
        yield f"staleness {show('staleness/mean', '.1f')}/{show('staleness/max', '.0f')}"
        yield f"generated {show('perf/throughput/generated', ',.0f')} tok/s"
        yield f"trained {show('perf/throughput/trained', ',.0f')} tok/s"
        yield f"idle {show('perf/trainer_idle', '.0%')}/{show('perf/replica_idle', '.0%')}"
        yield f"pause {show('weight_sync/pause_ms', '.1f')} ms"
        yield f"queue {show('rollout/ready_groups', '.0f')}+{show('rollout/inflight_groups', '.0f')}"

    def evaluation(self, global_steps: int, accuracy: float) -> None:
        """Show the held-out accuracy, in [0, 1], of the weights tagged `global_steps`."""
        accuracies = self._progress.accuracies
        before = f" (was {accuracies[-1][1]:.3f})" if accuracies else ""
        accuracies.append((global_steps, accuracy))
        self.message(f"eval {self._position(global_steps)}  held-out accuracy {accuracy:.3f}{before}")

    def message(self, text: str) -> None:
        """Show something worth keeping on the screen, for example a warning."""
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except OSError as error:
            if error.errno in READER_IS_GONE:
                null = os.open(os.devnull, os.O_WRONLY)  # also for what Python flushes when it ends
                os.dup2(null, self._stream.fileno())
                os.close(null)

    def end(self, state: str, text: str) -> None:
        """Stop drawing. The last frame says `state`, such as "finished", and `text` comes below it."""
        self.message(text)

    def close(self) -> None: ...

    def _timed(self, text: str) -> None:
        self.message(f"[{duration(self._progress.elapsed_s)}] {text}")

    def _position(self, global_steps: int) -> str:
        total = self._progress.total_steps
        return f"{global_steps:>{len(str(total))}}/{total}"


Console = PlainConsole | LiveConsole
"""The progress of a run, for a person."""


def make_console(total_steps: int, run_dir: Path, plain: bool | None = None) -> Console:
    """Return the plain console if `plain` is true, the live one if false; None decides by stdout being a terminal."""
    if plain is None:
        encoding = (sys.stdout.encoding or "").lower()
        plain = not sys.stdout.isatty() or os.environ.get("TERM") == "dumb" or not encoding.startswith("utf")
    if plain:
        return PlainConsole(total_steps, sys.stdout)
    return LiveConsole(Progress(total_steps=total_steps), run_dir, Target())


def _supervised(metrics: Mapping[str, float]) -> Iterator[str]:
    show = formatter(metrics)
    yield f"loss {show('actor/ce_loss', '.4f')}"
    yield f"grad {show('actor/grad_norm', '.2f')}"
    yield f"lr {show('actor/lr', '.2e')}"
    yield f"epoch {show('sft/epoch', '.2f')}"
    yield f"tokens {show('perf/trained_tokens', ',.0f')}"
    yield f"trained {show('perf/throughput/trained', ',.0f')} tok/s"
