"""The screen Pulse, and Compare: metrics by offset, the staleness of a step, and a sentence of advice."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Query

from scripts.dashboard.prediction import Predictor
from scripts.dashboard.status import meanings
from scripts.observe.files import finite_or_none, parse_objects, read_numbers
from scripts.observe.run import Run
from scripts.observe.status import State, read_status
from scripts.predict.advice import PREDICTED, advise, gather
from trainer.tracking.sinks import METRICS_FILE

PULSE_KEYS = (
    "critic/rewards/mean",
    "eval/accuracy",
    "actor/entropy",
    "actor/ess",
    "actor/pg_clipfrac",
    "actor/ce_loss",
    "eval/ce_loss",
    "perf/throughput/generated",
    "perf/throughput/trained",
    "perf/trainer_idle",
    "perf/replica_idle",
    "staleness/mean",
    "staleness/max",
    "coverage/length_distance",
    "coverage/turns_distance",
    "coverage/tool_s_distance",
    "rollout/inflight_groups",
    "rollout/ready_groups",
    "rollout/free_slots",
    "weight_sync/pause_ms",
    "weight_sync/swap_ms",
    "response_length/mean",
    "response_length/max",
    "timing_s/step",
    "timing_s/wait_batch",
    "timing_s/train_step",
    "timing_s/update_weights",
    "timing_s/elapsed",
    "rollout/zero_variance_groups",
    "rollout/retried_groups",
    "rollout/replicas_ready",
    "rollout/replicas_lost",
    "rollout/replicas_replaced",
)
"""The metrics that the page draws without being asked."""
ADVICE_BYTES = 400_000
"""The end of metrics.jsonl that the advice reads: more than its latest steps take."""


def metrics(run: Run, keys: Annotated[Sequence[str], Query()] = (), offset: int = 0, identity: str = "") -> Any:
    """Return a page of metrics.jsonl: `rows` of [step, time, value of each key], and the `names` of all its metrics.

    `is_new` says that the file is another than that of `identity`, as after a resume, and the page its first.
    """
    page = run.metrics_page(offset, identity)
    records, damaged = parse_objects(page.lines)
    records = [record for record in records if isinstance(record.get("step"), int)]
    return {
        "rows": [
            [record["step"], finite_or_none(record.get("time")), *(finite_or_none(record.get(key)) for key in keys)]
            for record in records
        ],
        "names": (names := sorted({name for record in records for name in record} - {"step", "time"})),
        "meanings": meanings(names),
        "offset": page.offset,
        "identity": page.identity,
        "is_new": page.is_new,
        "has_more": page.has_more,
        "damaged": damaged,
    }


def staleness(run: Run, step: int = 0) -> Any:
    """Count the sampled tokens of a step by their staleness in versions; `step` 0 is the latest one."""
    step = step or max(run.steps(), default=0)
    return {"step": step, "tokens": list(run.index(step).staleness(step).items()) if step else []}


def advice(run: Run, predictor: Predictor | None) -> Any:
    """Return a sentence of advice, what it rests on, and whether a better one is being worked out.

    Without a predictor only the rules speak.
    """
    rows = read_numbers(run.folder / METRICS_FILE, ADVICE_BYTES)
    run.event_index.read_on()
    loads = [
        {"waiting": samples[-1].load.waiting, "kv_usage": samples[-1].load.kv_usage}
        for samples in run.event_index.view.loads.values()
        if samples
    ]
    status = read_status(run)
    error = status.detail if status.state in (State.FAILED, State.KILLED) else ""
    phase = f"The run is {status.state.value}{f': {status.detail}' if status.detail else ''}."
    numbers = replace(gather(rows, run.flat_config(), loads), failure=error, phase=phase)
    steps = max((int(row["step"]) for row in rows if {"step", "timing_s/step"} <= row.keys()), default=0)
    predicted = None if predictor is None else predictor.latest(run, steps)
    rule, text = advise(numbers) if predicted is None else advise(numbers, predicted.text, predicted.gain)
    about = f"From the last {numbers.steps} steps." if numbers.steps > 1 else ""
    if predicted is not None and rule == PREDICTED:
        about = predicted.about
    elif predicted is not None and predicted.why:
        about += f" No prediction: {predicted.why}."
    return {"rule": rule, "text": text, "about": about, "is_pending": predictor is not None and predictor.is_busy}
