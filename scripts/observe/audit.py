"""Audit what a run has recorded: is everything there that must be, and is it what the run itself counted?

config.yaml says how many prompts and trajectories every step must have; metrics.jsonl and summary.json say what the run
saw of them while it trained. The records of trajectories, evaluations and discarded groups are held against both, and
every trained token against what the replicas wrote down when they sampled it.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from configs.checkpoint import CONFIG_FILE, read_config
from configs.schema import StalePolicy
from rollout.types import staleness
from scripts.observe.advantage_audit import AdvantageRule
from scripts.observe.coverage import (
    CoverageAudit,
    CoverageCounts,
    Terms,
    TrajectoryEnded,
    count_coverage,
    metrics_by_step,
)
from scripts.observe.files import RunError, each_record
from scripts.observe.proof import Proof, ProofReport
from scripts.observe.run import Run
from scripts.observe.source_audit import RowAudit, Share, SourceAudit, SourceCounts, shares_of
from scripts.observe.token_audit import TokenAudit, TokenCounts
from trainer.tracking.recorder import SUMMARY_FILE
from trainer.tracking.sinks import METRICS_FILE
from trainer.tracking.trajectories import (
    DISCARDED,
    EVALUATIONS,
    TRAJECTORIES,
    SequenceRecord,
    TrajectoryRecord,
    step_files,
)

DISCARD_REASONS = ("filtered", "aborted", "stale", "failed")
"""The reasons that summary.json counts."""
ROUNDING = 1e-4
"""The largest difference between a mean that the run logged and the mean of its records."""


# -- what the configs promise ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The part of a config that says what the records must hold."""

    total_steps: int
    prompts_per_step: int
    group_size: int
    shares: Mapping[str, Share]
    """The sources of data.sources by name; empty without such."""
    interval: int
    max_staleness: int
    bounds_tokens: bool
    """True if no token may be staler than `max_staleness`; false under `mask`, which leaves such out of the loss."""
    has_tokens: bool
    """True if the trained tokens are recorded, and what replicas sample."""
    num_samples: int
    terms: Terms
    advantages: AdvantageRule | None = None
    """The rule by which advantages follow from rewards, where they do."""
    is_uniform: bool = True
    """True if every row of the data is drawn once per epoch."""

    @classmethod
    def of(cls, config: DictConfig) -> Self:
        trainer, rollout = config.trainer, config.rollout
        return cls(
            total_steps=trainer.total_steps,
            prompts_per_step=trainer.prompts_per_step,
            group_size=config.algorithm.group_size,
            shares=shares_of(config),
            interval=config.weight_sync.interval,
            max_staleness=rollout.max_staleness,
            bounds_tokens=rollout.stale_policy != StalePolicy.mask.value,
            has_tokens=trainer.get("record_tokens", False),
            num_samples=config.evaluation.samples,
            terms=Terms(
                group_size=config.algorithm.group_size,
                stale_policy=rollout.stale_policy,
                mask_truncated=config.algorithm.get("mask_truncated", False),
            ),
            advantages=AdvantageRule.of(config),
            is_uniform=config.data.get("curriculum", {}).get("order", "uniform") == "uniform",
        )

    def size_of(self, source: str) -> int:
        """Return the group size of a source."""
        return self.shares[source].group_size if source in self.shares else self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """The configs of all processes of a run: one that resumed may have had another than the one before it."""

    earlier: Sequence[tuple[int, Plan]]
    """The step that the next process went on from and the config until then, in order of time."""
    last: Plan
    problems: tuple[str, ...] = ()
    """A sentence for each earlier config that cannot be read; its steps count as taken under the next one."""

    def for_step(self, step: int) -> Plan:
        """Return the config under which a step was taken: that of the last process that began before it."""
        plan = self.last
        for resumed_at, before in reversed(self.earlier):
            if resumed_at < step:
                break
            plan = before
        return plan

    @property
    def unrecorded_until(self) -> int:
        """The last step up to which a process recorded no tokens that the next one may have trained, or 0."""
        return max((resumed_at for resumed_at, before in self.earlier if not before.has_tokens), default=0)

    def for_evaluation(self, version: int) -> set[int]:
        """Return how many samples an evaluation may have of each prompt.

        An evaluation of the version that a process went on from was made by it, or by the process before it.
        """
        resumed = (before for resumed_at, before in self.earlier if resumed_at == version)
        return {plan.num_samples for plan in (*resumed, self.for_step(version), self.for_step(version + 1))}


def read_plans(run_dir: Path) -> Plans:
    """Read the configs of a run and of the processes before it. Raises RunError if the last one cannot be read."""
    earlier, problems = list[tuple[int, Plan]](), list[str]()
    for (_, path), (resumed_at, _) in pairwise(Run(run_dir).config_files()):
        try:
            earlier.append((resumed_at, _plan(path)))
        except RunError as error:
            problems.append(f"an earlier config: {error}")
    return Plans(earlier=earlier, last=_plan(run_dir / CONFIG_FILE), problems=tuple(problems))


def _plan(path: Path) -> Plan:
    try:
        return Plan.of(read_config(path))
    except (AttributeError, TypeError, ValueError, OmegaConfBaseException) as error:
        raise RunError(f"{path.parent} holds no training run of this version: {error}") from error


# -- what the records hold ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The outcome of an audit. Without `findings`, the run has trained what it was to train."""

    finished: bool
    """True if the run came to its end. What a run that was killed still had under way is neither lost nor a finding."""
    steps: int
    trajectories: int
    prompts: int
    """The number of different prompts that were trained."""
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
    """The largest staleness of a recorded token, in versions."""
    tokens: TokenCounts
    proof: ProofReport
    coverage: CoverageCounts
    sources: Mapping[str, SourceCounts]
    """The counts of each source of data.sources."""
    findings: tuple[str, ...]
    """A sentence for everything that is missing, damaged or contradicts what the run counted."""
    notes: tuple[str, ...]
    """A sentence for every window of prompts in which the trained ones are not as long as the claimed ones, because
    the config allows it."""

    @property
    def _by_source(self) -> str:
        """The trained prompts of each source in words; nothing where there is one."""
        counts = ", ".join(f"{count.trained} of {source}" for source, count in self.sources.items())
        return f"trained prompts by source: {counts}; " if counts else ""

    @property
    def sentence(self) -> str:
        """The outcome in one line, for a person."""
        findings = f"{len(self.findings)} finding(s), the first: {self.findings[0]}" if self.findings else "no findings"
        notes = f"; {len(self.notes)} note(s), the first: {self.notes[0]}" if self.notes else ""
        checked, unchecked = self.tokens.trained - self.tokens.unchecked, self.tokens.unchecked
        without = f", {unchecked} without a record to check them by" if unchecked else ""
        return (
            f"audit: {self.steps} steps, {self.trajectories} trajectories of {self.prompts} prompts, {self.discarded} "
            f"discarded, {self.lost} lost, {self.twice} trained twice, staleness at most {self.max_staleness}"
            f"{'' if self.evaluations else ', no evaluation'}; {self._by_source}"
            f"{checked} trained tokens held against what was sampled{without}; a chain of {self.proof.steps} steps "
            f"with the link {self.proof.link[:16]}; {findings}{notes}"
        )


def audit(run_dir: Path, summary: Mapping[str, Any] | None = None, *, checkpoints: bool = True) -> Audit:
    """Audit a run folder, with this summary if it has not been written yet, else with the one in the folder.

    Whatever is wrong with a file of the run is a finding.

    Args:
        checkpoints: read the checkpoints too, which takes minutes where they are large.

    Raises:
        RunError: the folder holds no training run of this version, or a supervised one.
    """
    return _Auditor(Run.open(run_dir), read_plans(run_dir), summary).audit(checkpoints)


@dataclass(frozen=True, slots=True)
class _Discarded:
    """The part of a `DiscardRecord` that the audit needs; the whole one holds texts."""

    ordinal: int
    reason: str
    trajectories: list[TrajectoryEnded] = field(default_factory=list)
    row: int | None = None
    source: str = ""
    source_ordinal: int = 0


class _Auditor:
    def __init__(self, run: Run, plans: Plans, summary: Mapping[str, Any] | None):
        self._run, self._plans = run, plans
        self._findings = list(plans.problems)
        self._summary = self._read_summary() if summary is None else summary
        logged = self._read_metrics()
        self._logged = {line["step"]: line for line in logged if "timing_s/step" in line}
        if self._logged and all("critic/rewards/mean" not in line for line in self._logged.values()):
            raise RunError(f"{run.folder} holds a supervised run: nothing was sampled that could be audited")
        self._evaluated = {line["step"]: line for line in logged if "eval/accuracy" in line}
        self._steps_by_ordinal: Counter[int] = Counter()
        self._again: set[int] = set()
        self._coverage = CoverageAudit(plans.last.prompts_per_step)
        self._sources = SourceAudit()
        self._masks_sampled = False  # a sampled token was left out of the loss, as a user's agent loop may do
        self._trajectories = self._descending = self._newer = self._stalest = self._missing = 0
        self._num_logged = Counter(line["step"] for line in logged if "timing_s/step" in line)
        self._proof = Proof(run.folder)
        self._rows = RowAudit()

    def audit(self, checkpoints: bool) -> Audit:
        first, last = self._range()
        self._tokens = TokenAudit(self._run.folder, max(first - 1, self._plans.unrecorded_until))
        for step in range(first, last + 1):
            self._audit_step(step)
            if first == 1:
                self._audit_shares(step)
        self._findings += self._tokens.findings()
        self._findings += self._proof.findings(first, last, has_ended=self._summary is not None)
        if checkpoints:
            self._findings += self._proof.findings_of_checkpoints()
        self._audit_names(last)
        discarded = self._audit_discarded()
        has_one_order = self._plans.last.is_uniform and not self._plans.last.shares
        self._findings += self._rows.findings(is_uniform=first == 1 and has_one_order)
        for step, line in self._evaluated.items():
            self._audit_evaluation(step, line)
        lost = set(range(max(self._steps_by_ordinal, default=-1) + 1)) - set(self._steps_by_ordinal) - set(discarded)
        if first > 1:
            lost = set()  # the folder that the run came from knows about them
        if self._summary is not None:
            self._audit_summary(self._summary, first, last, discarded)
            if lost:
                self._find(f"{len(lost)} prompts were neither trained nor discarded: {_some(lost)}")
        notes, coverage = self._audit_coverage(first)
        if self._summary is not None and first == 1:
            self._findings += self._sources.findings(self._plans.last.shares)
        if self._again:
            self._find(f"{len(self._again)} prompts were trained twice: {_some(self._again)}")
        return Audit(
            finished=self._summary is not None,
            steps=last - first + 1 - self._missing,
            trajectories=self._trajectories,
            prompts=len(self._steps_by_ordinal),
            discarded=len(discarded),
            evaluations=len(self._evaluated),
            lost=len(lost),
            twice=len(self._again),
            missing_steps=self._missing,
            descending_versions=self._descending,
            newer_versions=self._newer,
            max_staleness=self._stalest,
            tokens=self._tokens.counts(),
            proof=self._proof.report(),
            coverage=coverage,
            sources=self._sources.counts(),
            findings=tuple(self._findings),
            notes=tuple(notes),
        )

    def _find(self, what: str) -> None:
        self._findings.append(what)

    def _read_summary(self) -> Mapping[str, Any] | None:
        try:
            summary = self._run.summary()
        except (OSError, ValueError) as error:
            self._find(str(error))
            return {}
        if summary is None:
            return None
        counts = {"recorded_since", *(f"{reason}_groups" for reason in DISCARD_REASONS)}
        for key in counts & summary.keys():
            if type(summary[key]) is not int:
                self._find(f"{SUMMARY_FILE} says {key}={summary.pop(key)!r}, must be a whole number")
        return summary

    def _read_metrics(self) -> list[dict[str, Any]]:
        try:
            if not (self._run.folder / METRICS_FILE).read_bytes().endswith(b"\n"):
                self._find(f"{METRICS_FILE}: the last line is cut, or there is none")
            return [line for line in self._run.metrics() if isinstance(line.get("step"), int)]
        except (OSError, ValueError) as error:
            self._find(f"{METRICS_FILE} cannot be read: {error}")
            return []

    def _range(self) -> tuple[int, int]:
        """Return the first and the last step that must have been recorded in this folder."""
        if self._summary is None:
            known = [*self._logged, *self._run.steps()]
            return min(known, default=1), max(self._logged, default=0)
        return int(self._summary.get("recorded_since", 0)) + 1, self._plans.last.total_steps

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _audit_step(self, step: int) -> None:
        name = f"{TRAJECTORIES}/step_{step:06d}.jsonl"
        if self._num_logged[step] != 1:
            self._find(f"step {step} has {self._num_logged[step]} lines in {METRICS_FILE}, must be 1")
        try:
            read = self._run.trajectories(step)
        except OSError as error:
            self._missing += 1
            return self._find(f"step {step} has no records: {error}")
        self._findings += [f"{name}: {problem}" for problem in read.problems]
        records, plan, logged = read.records, self._plans.for_step(step), self._logged.get(step, {})
        self._trajectories += len(records)
        self._audit_advantages(step, records)
        self._audit_groups(step, records)
        stalest = self._audit_versions(step, records)
        self._findings += [f"step {step}: {what}" for what in _differences(logged, _means(records))]
        counted = logged.get("staleness/max", stalest)
        # What a user's agent loop left out of the loss may have been the stalest of all that was sampled.
        if plan.bounds_tokens and not (counted <= stalest if self._masks_sampled else counted == stalest):
            self._find(f"step {step}: staleness/max was {counted:g}, is {stalest} in its records")
        arrays = self._audit_tokens(step, records) if plan.has_tokens else None
        self._findings += self._proof.findings_of(step, records, arrays)
        if not plan.has_tokens:
            self._tokens.skip(sum(sequence.loss_tokens for record in records for sequence in record.sequences))

    def _audit_advantages(self, step: int, records: Sequence[TrajectoryRecord]) -> None:
        """Find the first advantage that the rewards do not make. In a step that was skipped all are 0."""
        rule = self._plans.for_step(step).advantages
        # What is logged is the number of skipped steps so far.
        before, after = (self._logged.get(number, {}).get("actor/skipped_steps", 0) for number in (step - 1, step))
        was_skipped = after > before
        if rule is not None and not was_skipped and (wrong := next(rule.wrong(records), None)):
            self._find(f"step {step}, {wrong}")

    def _audit_groups(self, step: int, records: Sequence[TrajectoryRecord]) -> None:
        plan = self._plans.for_step(step)
        groups: dict[int, list[TrajectoryRecord]] = {}
        for record in records:
            groups.setdefault(record.ordinal, []).append(record)
            self._rows.take(record.ordinal, record.row)
        if len(groups) != plan.prompts_per_step:
            self._find(f"step {step} has {len(groups)} prompts, trainer.prompts_per_step={plan.prompts_per_step}")
        for ordinal, group in groups.items():
            its, indices = group[0], sorted(record.index for record in group)
            self._coverage.take_trained(step, ordinal, group, plan.terms)
            self._sources.take(its.source, its.source_ordinal, ordinal=ordinal, row=its.row, trained=True)
            self._steps_by_ordinal[ordinal] += 1
            if self._steps_by_ordinal[ordinal] > 1 or len(set(indices)) < len(indices):
                self._again.add(ordinal)
            if indices != list(range(size := plan.size_of(its.source))):
                there = f"trajectories {indices}, algorithm.group_size={size}"
                self._find(f"step {step}: prompt {ordinal} has {there}")

    def _audit_shares(self, step: int) -> None:
        """Find a source that is a whole group away from its share of the groups trained so far. Other weights before a
        resume leave nothing to compare."""
        plan = self._plans.for_step(step)
        every = [self._plans.last, *(before for _, before in self._plans.earlier)]
        if any((other.shares, other.prompts_per_step) != (plan.shares, plan.prompts_per_step) for other in every):
            return
        self._findings += self._sources.findings_of_step(step, plan.shares, plan.prompts_per_step)

    def _audit_versions(self, step: int, records: Sequence[TrajectoryRecord]) -> int:
        """Return the largest staleness of the step."""
        plan, stalest = self._plans.for_step(step), 0
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
        """Return the versions that sampled the sequence, one for each span."""
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

    def _audit_tokens(self, step: int, records: Sequence[TrajectoryRecord]) -> dict[str, Any] | None:
        """Return the arrays of the step, if they belong to the records."""
        name = f"{TRAJECTORIES}/step_{step:06d}.npz"
        try:
            arrays = self._run.tokens(step)
            of_records = {
                "ordinals": [record.ordinal for record in records],
                "num_sequences": [len(record.sequences) for record in records],
                "response_lengths": [each.response_tokens for record in records for each in record.sequences],
            }
            if any(arrays[key].tolist() != numbers for key, numbers in of_records.items()):
                self._find(f"{name} holds other trajectories than step_{step:06d}.jsonl")
                return None
            self._tokens.take_step(step, arrays, [(record.ordinal, record.index) for record in records])
        except (OSError, ValueError, KeyError, MemoryError, OverflowError) as error:
            self._find(f"{name} cannot be read: {error}")  # numbers of damaged arrays ask for any amount of memory
            return None
        return arrays

    def _audit_names(self, last: int) -> None:
        """Find files and metrics of steps that were not taken.

        A run that was killed may have recorded the last step without logging it yet.
        """
        last += self._summary is None
        steps = {step for step, _ in step_files(self._run.folder / TRAJECTORIES)}
        if beyond := {step for step in steps | set(self._logged) if step > last}:
            self._find(f"there are records of steps that were not taken: {_some(beyond)}")

    # -- the rest ------------------------------------------------------------------------------------------------------

    def _audit_discarded(self) -> dict[int, str]:
        """Return why each prompt was discarded, without those that were trained after all, as after a kill."""
        reasons: dict[int, str] = {}
        for step, path in step_files(self._run.folder / DISCARDED):
            terms = self._plans.for_step(step).terms
            try:
                for record in each_record(path, _Discarded):
                    if isinstance(record, str):
                        self._find(f"{DISCARDED}/{path.name}: {record}")
                        continue
                    self._rows.take(record.ordinal, record.row)
                    if record.ordinal not in self._steps_by_ordinal:
                        reasons[record.ordinal] = record.reason
                        its = replace(terms, group_size=self._plans.for_step(step).size_of(record.source))
                        self._coverage.take_discarded(step, record.ordinal, record.reason, record.trajectories, its)
                        place, row = record.source_ordinal, record.row
                        self._sources.take(record.source, place, ordinal=record.ordinal, row=row, trained=False)
            except OSError as error:
                self._find(f"{DISCARDED}/{path.name} cannot be read: {error}")
        return reasons

    def _audit_coverage(self, first: int) -> tuple[list[str], CoverageCounts]:
        """Compare what was trained with what was claimed. Return the notes, and the counts."""
        windows = self._coverage.windows(finished=self._summary is not None)
        if first == 1 and not self._plans.earlier:  # a process that resumes logs fewer windows
            for step, metrics in metrics_by_step(windows).items():
                self._findings += [f"step {step}: {what}" for what in _differences(self._logged.get(step, {}), metrics)]
        self._findings += [what for window in windows if (what := window.missing(allowed=False)) is not None]
        notes = [what for window in windows if (what := window.missing(allowed=True)) is not None]
        return notes, count_coverage(windows)

    def _audit_evaluation(self, step: int, logged: Mapping[str, float]) -> None:
        name = f"{EVALUATIONS}/step_{step:06d}.jsonl"
        try:
            read = self._run.evaluation(step)
        except OSError as error:
            return self._find(f"the evaluation of version {step} has no records: {error}")
        self._findings += [f"{name}: {problem}" for problem in read.problems]
        records = read.records
        allowed = sorted(int(logged["eval/num_prompts"]) * num for num in self._plans.for_evaluation(step))
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
        for key, recorded in counted.items():
            if summary.get(key) != recorded:
                self._find(f"{SUMMARY_FILE} says {key}={summary.get(key)}, the records {recorded}")
        reasons = Counter(discarded.values())
        for key in DISCARD_REASONS:
            num_groups = summary.get(f"{key}_groups", 0)
            if first == 1 and reasons[key] < num_groups:
                self._find(f"{SUMMARY_FILE} says {key}_groups={num_groups}, {DISCARDED}/ {reasons[key]}")


def ascends(versions: Sequence[int]) -> bool:
    """Return whether no version is older than the one before it."""
    return list(versions) == sorted(versions)


def _means(records: Sequence[TrajectoryRecord]) -> dict[str, float]:
    """Return the metrics of a step as they follow from its records."""
    scored = [record.reward for record in records if record.error is None and record.finish_reason != "abort"]
    return {
        "critic/score/mean": _mean(scored or [0.0]),
        "response_length/mean": _mean(
            sum(sequence.response_tokens for sequence in record.sequences) for record in records
        ),
        "perf/tokens": float(sum(s.prompt_tokens + s.response_tokens for record in records for s in record.sequences)),
    }


def _differences(logged: Mapping[str, float], recorded: Mapping[str, float]) -> Iterator[str]:
    for name, value in recorded.items():
        if name in logged and not math.isclose(logged[name], value, rel_tol=ROUNDING, abs_tol=ROUNDING):
            yield f"{name} was {logged[name]:g}, is {value:g} in its records"


def _mean(values: Any) -> float:
    some = list(values)
    return sum(some) / len(some) if some else math.nan


def _some(numbers: set[int]) -> str:
    first = sorted(numbers)[:10]
    return ", ".join(map(str, first)) + (", ..." if len(numbers) > len(first) else "")
