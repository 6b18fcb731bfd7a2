"""Audits what a run has recorded: is everything there that must be, and is it what the run itself counted?

config.yaml says how many prompts and trajectories every step must have; metrics.jsonl and summary.json what the run saw
of them while it trained. The records of trajectories, evaluations and discarded groups are held against both, and every
trained token against what the replicas wrote down when they sampled it.
"""

import json
import math
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollout.types import staleness
from trainer.tracking.plans import NoRunError, Plans, read_plans
from trainer.tracking.recorder import SUMMARY_FILE
from trainer.tracking.records import (
    DISCARDED,
    EVALUATIONS,
    TRAJECTORIES,
    SampleRecord,
    SequenceRecord,
    TrajectoryRecord,
    each_record,
    read_records,
    step_files,
)
from trainer.tracking.sinks import METRICS_FILE, read_metrics
from trainer.tracking.token_audit import TokenAudit, TokenCounts

DISCARD_REASONS = ("filtered", "aborted", "stale", "failed")
"""Those that summary.json counts."""
ROUNDING = 1e-4
"""Largest difference between a mean that the run logged and the mean of its records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The outcome. A run may be trusted to have trained what it should when there are no `findings`."""

    finished: bool
    """Whether the run came to its end. What one that did not still had under way is neither lost nor a finding."""
    steps: int
    trajectories: int
    prompts: int
    """Different prompts that were trained."""
    discarded: int
    """Prompts whose groups were filtered out, dropped, aborted or given up, as discarded/ says."""
    evaluations: int
    lost: int
    """Prompts before the last trained one that were neither trained nor discarded."""
    twice: int
    """Prompts that were trained in more than one step, or one of whose trajectories was trained more than once."""
    missing_steps: int
    descending_versions: int
    """Trajectories with a token of an older version than the token before it."""
    newer_versions: int
    """Trajectories with a token of weights that did not exist when the step that trained it began."""
    max_staleness: int
    """Of all recorded tokens, in versions."""
    tokens: TokenCounts
    findings: tuple[str, ...]
    """A sentence for everything that is missing, damaged or contradicts what the run counted."""

    @property
    def sentence(self) -> str:
        """One line for a person."""
        found = f"{len(self.findings)} finding(s), the first: {self.findings[0]}" if self.findings else "no findings"
        checked, unchecked = self.tokens.trained - self.tokens.unchecked, self.tokens.unchecked
        without = f", {unchecked} without a record to check them by" if unchecked else ""
        return (
            f"audit: {self.steps} steps, {self.trajectories} trajectories of {self.prompts} prompts, {self.discarded} "
            f"discarded, {self.lost} lost, {self.twice} trained twice, staleness at most {self.max_staleness}; "
            f"{checked} trained tokens held against what was sampled{without}; {found}"
        )


def audit(run_dir: Path, summary: Mapping[str, Any] | None = None) -> Audit:
    """Audit a run folder. `summary`: what summary.json says, read from there where it is not given.

    Raises NoRunError, also for a supervised run. Whatever is wrong with a file of the run is a finding.
    """
    return _Auditor(run_dir, read_plans(run_dir), summary).audit()


@dataclass(frozen=True, slots=True)
class _Discarded:
    """What the audit reads of a `DiscardRecord`, which holds whole texts."""

    ordinal: int
    reason: str


class _Auditor:
    def __init__(self, run_dir: Path, plans: Plans, summary: Mapping[str, Any] | None):
        self._run_dir, self._plans = run_dir, plans
        self._findings = list(plans.problems)
        self._summary = self._read_summary() if summary is None else summary
        logged = self._read_metrics()
        self._logged = {line["step"]: line for line in logged if "timing_s/step" in line}
        if self._logged and all("critic/rewards/mean" not in line for line in self._logged.values()):
            raise NoRunError(f"{run_dir} holds a supervised run: nothing was sampled that could be audited")
        self._evaluated = {line["step"]: line for line in logged if "eval/accuracy" in line}
        self._steps_of: Counter[int] = Counter()
        self._again: set[int] = set()
        self._masks_sampled = False  # whether a sampled token was left out of the loss, as a user's agent loop may
        self._trajectories = self._descending = self._newer = self._stalest = self._missing = 0
        self._num_logged = Counter(line["step"] for line in logged if "timing_s/step" in line)

    def audit(self) -> Audit:
        first, last = self._range()
        self._tokens = TokenAudit(self._run_dir, max(first - 1, self._plans.unrecorded_until))
        for step in range(first, last + 1):
            self._audit_step(step)
        self._findings += self._tokens.findings()
        self._audit_names(last)
        discarded = self._audit_discarded()
        for step, line in self._evaluated.items():
            self._audit_evaluation(step, line)
        lost = set(range(max(self._steps_of, default=-1) + 1)) - set(self._steps_of) - set(discarded)
        if first > 1:
            lost = set()  # the folder that the run came from knows about them
        if self._summary is not None:
            self._audit_summary(self._summary, first, last, discarded)
            if lost:
                self._find(f"{len(lost)} prompts were neither trained nor discarded: {_some(lost)}")
        if self._again:
            self._find(f"{len(self._again)} prompts were trained twice: {_some(self._again)}")
        return Audit(
            finished=self._summary is not None,
            steps=last - first + 1 - self._missing,
            trajectories=self._trajectories,
            prompts=len(self._steps_of),
            discarded=len(discarded),
            evaluations=len(self._evaluated),
            lost=len(lost),
            twice=len(self._again),
            missing_steps=self._missing,
            descending_versions=self._descending,
            newer_versions=self._newer,
            max_staleness=self._stalest,
            tokens=self._tokens.counts(),
            findings=tuple(self._findings),
        )

    def _find(self, what: str) -> None:
        self._findings.append(what)

    def _read_summary(self) -> Mapping[str, Any] | None:
        path = self._run_dir / SUMMARY_FILE
        if not path.exists():
            return None
        try:
            summary = dict(json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            self._find(f"{SUMMARY_FILE} is damaged: {error}")
            return {}
        counts = {"recorded_since", *(f"{reason}_groups" for reason in DISCARD_REASONS)}
        for key in counts & summary.keys():
            if type(summary[key]) is not int:
                self._find(f"{SUMMARY_FILE} says {key}={summary.pop(key)!r}, must be a whole number")
        return summary

    def _read_metrics(self) -> list[dict[str, Any]]:
        path = self._run_dir / METRICS_FILE
        try:
            if not path.read_bytes().endswith(b"\n"):
                self._find(f"{METRICS_FILE}: the last line is cut, or there is none")
            return [line for line in read_metrics(path) if isinstance(line.get("step"), int)]
        except (OSError, ValueError) as error:
            self._find(f"{METRICS_FILE} cannot be read: {error}")
            return []

    def _range(self) -> tuple[int, int]:
        """The first and the last step that must have been recorded in this folder."""
        recorded = [step for step, path in step_files(self._run_dir / TRAJECTORIES) if path.suffix == ".jsonl"]
        if self._summary is None:
            known = [*self._logged, *recorded]
            return min(known, default=1), max(self._logged, default=0)
        return int(self._summary.get("recorded_since", 0)) + 1, self._plans.last.total_steps

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _audit_step(self, step: int) -> None:
        name = f"{TRAJECTORIES}/step_{step:06d}.jsonl"
        if self._num_logged[step] != 1:
            self._find(f"step {step} has {self._num_logged[step]} lines in {METRICS_FILE}, must be 1")
        try:
            records, problems = read_records(self._run_dir / name, TrajectoryRecord)
        except OSError as error:
            self._missing += 1
            return self._find(f"step {step} has no records: {error}")
        for problem in problems:
            self._find(f"{name}: {problem}")
        self._trajectories += len(records)
        self._audit_groups(step, records)
        stalest = self._audit_versions(step, records)
        for what in _differences(self._logged.get(step, {}), _means(records)):
            self._find(f"step {step}: {what}")
        logged, plan = self._logged.get(step, {}), self._plans.of_step(step)
        if plan.bounds_tokens and not self._is_staleness(logged.get("staleness/max", stalest), stalest):
            self._find(f"step {step}: staleness/max was {logged['staleness/max']:g}, is {stalest} in its records")
        if plan.has_tokens:
            self._audit_tokens(step, records)
        else:
            self._tokens.skip(sum(sequence.loss_tokens for record in records for sequence in record.sequences))

    def _audit_groups(self, step: int, records: Sequence[TrajectoryRecord]) -> None:
        plan = self._plans.of_step(step)
        indices: dict[int, list[int]] = {}
        for record in records:
            indices.setdefault(record.ordinal, []).append(record.index)
        self._steps_of.update(indices.keys())
        self._again |= {ordinal for ordinal in indices if self._steps_of[ordinal] > 1}
        self._again |= {ordinal for ordinal, some in indices.items() if len(set(some)) < len(some)}
        if len(indices) != plan.prompts_per_step:
            self._find(f"step {step} has {len(indices)} prompts, trainer.prompts_per_step={plan.prompts_per_step}")
        for ordinal, some in indices.items():
            if sorted(some) != list(range(plan.group_size)):
                found = f"trajectories {sorted(some)}, algorithm.group_size={plan.group_size}"
                self._find(f"step {step}: prompt {ordinal} has {found}")

    def _audit_versions(self, step: int, records: Sequence[TrajectoryRecord]) -> int:
        """Returns the largest staleness."""
        plan, stalest = self._plans.of_step(step), 0
        for record in records:
            where = f"step {step}, prompt {record.ordinal}, trajectory {record.index}"
            for sequence in record.sequences:
                versions = self._audit_spans(step, where, sequence)
                stalest = max([stalest, *(staleness(version, step - 1, plan.interval) for version in versions)])
        if plan.bounds_tokens and stalest > plan.max_staleness:
            self._find(f"step {step}: a token is {stalest} versions old, rollout.max_staleness={plan.max_staleness}")
        self._stalest = max(self._stalest, stalest)
        return stalest

    def _audit_spans(self, step: int, where: str, sequence: SequenceRecord) -> list[int]:
        """Returns the versions that sampled the sequence, one per span."""
        versions = [version for _, _, version in sequence.versions]
        places = [place for start, end, _ in sequence.versions for place in (start, end)]
        is_in_order = places == sorted(places) and all(start < end for start, end, _ in sequence.versions)
        if not is_in_order or (places and not 0 <= places[0] <= places[-1] <= sequence.response_tokens):
            self._find(f"{where}: the spans {sequence.versions} do not fit {sequence.response_tokens} tokens")
        if not ascends(versions):
            self._descending += 1
            self._find(f"{where}: the versions {versions} descend")
        if max(versions, default=0) > step - 1:
            self._newer += 1
            self._find(f"{where}: a token is of version {max(versions)}, which step {step} was to make")
        self._masks_sampled |= sequence.loss_tokens < sum(end - start for start, end, _ in sequence.versions)
        return versions

    def _is_staleness(self, counted: float, recorded: int) -> bool:
        """Whether the run may have counted that of its loss tokens, where that of all sampled ones is `recorded`."""
        return counted <= recorded if self._masks_sampled else counted == recorded

    def _audit_tokens(self, step: int, records: Sequence[TrajectoryRecord]) -> None:
        name = f"{TRAJECTORIES}/step_{step:06d}.npz"
        try:
            with np.load(self._run_dir / name) as file:
                arrays = dict(file)
            ordinals = np.repeat(arrays["ordinals"], arrays["num_sequences"]).tolist()
            of_tokens = list(zip(ordinals, arrays["response_lengths"].tolist(), strict=True))
            if of_tokens != [(record.ordinal, one.response_tokens) for record in records for one in record.sequences]:
                return self._find(f"{name} holds other trajectories than step_{step:06d}.jsonl")
            self._tokens.take_step(step, arrays, [(record.ordinal, record.index) for record in records])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            return self._find(f"{name} cannot be read: {error}")

    def _audit_names(self, last: int) -> None:
        """The last step may be recorded and not logged yet, when the run was killed in between."""
        last += self._summary is None
        steps = {step for step, _ in step_files(self._run_dir / TRAJECTORIES)}
        if beyond := {step for step in steps | set(self._logged) if step > last}:
            self._find(f"there are records of steps that were not taken: {_some(beyond)}")

    # -- the rest ------------------------------------------------------------------------------------------------------

    def _audit_discarded(self) -> dict[int, str]:
        """Returns the reason for each discarded prompt that was not trained after all, as after a kill it may be."""
        reasons: dict[int, str] = {}
        for _, path in step_files(self._run_dir / DISCARDED):
            try:
                for record in each_record(path, _Discarded):
                    if isinstance(record, str):
                        self._find(f"{DISCARDED}/{path.name}: {record}")
                    elif record.ordinal not in self._steps_of:
                        reasons[record.ordinal] = record.reason
            except OSError as error:
                self._find(f"{DISCARDED}/{path.name} cannot be read: {error}")
        return reasons

    def _audit_evaluation(self, step: int, logged: Mapping[str, float]) -> None:
        name = f"{EVALUATIONS}/step_{step:06d}.jsonl"
        try:
            records, problems = read_records(self._run_dir / name, SampleRecord)
        except OSError as error:
            return self._find(f"the evaluation of version {step} has no records: {error}")
        for problem in problems:
            self._find(f"{name}: {problem}")
        allowed = sorted(int(logged["eval/num_prompts"]) * num for num in self._plans.of_evaluation(step))
        if len({(record.ordinal, record.index) for record in records}) != len(records) or len(records) not in allowed:
            must = " or ".join(map(str, allowed))
            self._find(f"{name} has {len(records)} samples, must be {must} different ones")
        elif records and abs(_mean(record.accuracy for record in records) - logged["eval/accuracy"]) > ROUNDING:
            self._find(f"{name}: its mean accuracy is not eval/accuracy={logged['eval/accuracy']:.4f}")

    def _audit_summary(self, summary: Mapping[str, Any], first: int, last: int, discarded: Mapping[int, str]) -> None:
        counted: dict[str, object] = {"steps": last}
        if first == 1:
            counted["trajectories"] = self._trajectories
        if self._plans.last.bounds_tokens and first == 1 and not self._masks_sampled:
            counted["max_token_staleness"] = self._stalest
        if self._evaluated:
            counted["accuracy_after"] = self._evaluated[max(self._evaluated)]["eval/accuracy"]
        for key, found in counted.items():
            if summary.get(key) != found:
                self._find(f"{SUMMARY_FILE} says {key}={summary.get(key)}, the records {found}")
        reasons = Counter(discarded.values())
        for key in DISCARD_REASONS:
            said = summary.get(f"{key}_groups", 0)
            if first == 1 and reasons[key] < said:
                self._find(f"{SUMMARY_FILE} says {key}_groups={said}, {DISCARDED}/ {reasons[key]}")


def ascends(versions: Sequence[int]) -> bool:
    """Whether no version is older than the one before it."""
    return list(versions) == sorted(versions)


def _means(records: Sequence[TrajectoryRecord]) -> dict[str, float]:
    """What the metrics of a step must be by its records."""
    scored = [record.reward for record in records if record.error is None and record.finish_reason != "abort"]
    return {
        "critic/score/mean": _mean(scored or [0.0]),
        "response_length/mean": _mean(sum(one.response_tokens for one in record.sequences) for record in records),
        "perf/tokens": float(sum(one.prompt_tokens + one.response_tokens for r in records for one in r.sequences)),
    }


def _differences(logged: Mapping[str, float], found: Mapping[str, float]) -> Iterator[str]:
    for name, value in found.items():
        if name in logged and not math.isclose(logged[name], value, rel_tol=ROUNDING, abs_tol=ROUNDING):
            yield f"{name} was {logged[name]:g}, is {value:g} in its records"


def _mean(values: Any) -> float:
    some = list(values)
    return sum(some) / len(some) if some else math.nan


def _some(numbers: set[int]) -> str:
    first = sorted(numbers)[:10]
    return ", ".join(map(str, first)) + (", ..." if len(numbers) > len(first) else "")
