"""Run folders for the tests of the page: a simulated run with the records and events of a real one."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from rollout.events.kinds import FleetEvent, FleetEventKind, RunEnded, RunStarted, Stamped
from scripts.bench.asynchrony.limits import Job
from scripts.bench.asynchrony.simulated import run_job_here
from scripts.bench.common import LogNormalLengths
from scripts.bench.virtual_clock import run_virtual
from tests.support.event_runs import Trained
from tests.support.happenings import at, write
from tests.support.recordings import Screen
from trainer.tracking.recorder import RunRecorder
from trainer.tracking.records import TRAJECTORIES
from trainer.tracking.sinks import METRICS_FILE, JsonlSink, Tracker

EPOCH = 1_764_000_000.0
"""Virtual clocks begin at 0, runs do not."""
HOSTILE = "<script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">\u202e\u0000\ud800"
"""What a prompt may have in it: markup, a change of direction, a control character, half of a surrogate pair."""
JOB = Job(
    length_of=LogNormalLengths(mean=120, sigma=0.8, cap=600), num_steps=8, prompts_per_step=3, group_size=3, train_s=1.0
)
CONFIG = "rollout:\n  max_staleness: 2\n  max_num_seqs: 64\n  num_replicas: 2\n"


class Recorded(Trained):
    """Writes every step into the run folder, as a real run does."""

    def __init__(self, run_dir: Path, stamped: list[Stamped]):
        super().__init__(stamped.extend)
        tracker = Tracker([JsonlSink(run_dir / METRICS_FILE)])
        self._recorder = RunRecorder(run_dir, tracker, Screen(), record_tokens=True)

    def record_step(self, global_steps: int, metrics: Any, groups: Any, advantages: Any) -> None:
        super().record_step(global_steps, metrics, groups, advantages)
        self._recorder.record_step(global_steps, metrics, groups, advantages)


def simulated_run(run_dir: Path, *, tells: bool = True) -> Path:
    """A folder of eight steps of three groups of three on two replicas; prompts are HOSTILE. `tells`: it has events."""
    run_dir.mkdir(parents=True)
    stamped: list[Stamped] = []
    run_virtual(run_job_here(JOB, 2, write=stamped.extend, recorder=Recorded(run_dir, stamped)))
    for path in (run_dir / TRAJECTORIES).glob("*.jsonl"):  # simulated prompts have no text
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        texts = {"prompt": f"Question {HOSTILE}", "response": f"Answer {HOSTILE}"}
        path.write_text("".join(json.dumps(row | texts) + "\n" for row in rows))
    (run_dir / "config.yaml").write_text(CONFIG)
    (run_dir / "driver.log").write_text("began\nended\n")
    if tells:
        start = RunStarted(
            **{"global_steps": 0, "total_steps": JOB.num_steps, "prompts_per_step": 3, "group_size": 3},
            **{"max_staleness": 2, "num_replicas": 2, "num_ranks": 1, "host": "here"},
        )
        lost = FleetEvent(FleetEventKind.GIVEN_UP, "replica-1", f"replica-1 is given up: {HOSTILE}")
        last = stamped[-1].time
        whole = [at(0.0, start), *stamped, at(last, lost), at(last, RunEnded(exit_code=1, error="it broke"))]
        write(run_dir, [dataclasses.replace(one, time=EPOCH + one.time) for one in whole])
    return run_dir
