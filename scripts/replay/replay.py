"""Take the steps of a run again from its records, as they were taken or with other values of the config.

As they were taken, every step must give the weights that the run got, bit for bit. With other values, the original is
taken beside them, so that each step tells how the two trainings differ.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from configs.checkpoint import CHECKPOINTS
from configs.schema import Config
from configs.validate import ConfigError
from scripts.launch.cluster import cluster
from scripts.observe.recorded_groups import RecordedStep, read_step
from scripts.replay.plan import ConfigSpan, ReplayPlan, differences
from scripts.replay.trainer import ReplayedStep, ReplayTrainer
from trainer.checkpoint.store import CheckpointError, verified
from trainer.metrics import to_floats
from trainer.tracking.proof import Origin
from trainer.tracking.sinks import METRICS_FILE, JsonlSink


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCheck:
    """A step that was taken again, held against its records. None: there is nothing to hold it against."""

    step: int
    weights: str
    """The digest of the weights after it."""
    weights_equal: bool | None
    advantages_equal: bool | None
    """The tokens have the same advantages, bit for bit, and `logprobs_equal` the same logprobs of the trainer."""
    logprobs_equal: bool | None
    logprob_difference: float
    """The largest difference of a logprob; NaN where none was computed."""

    @classmethod
    def of(cls, step: int, taken: ReplayedStep, recorded: RecordedStep, digest: str | None) -> "StepCheck":
        tokens = taken.assembled.sampled(taken.result)
        advantages = logprobs = None
        difference = math.nan
        if tokens is not None and recorded.advantages is not None and recorded.logprobs is not None:
            credited = taken.assembled.is_credited
            if credited is not None and len(recorded.advantages) < len(credited):  # as earlier versions recorded
                tokens = tokens.at(credited)
            advantages = _same_bits(tokens.advantages, recorded.advantages)
            logprobs = _same_bits(tokens.logprobs, recorded.logprobs)
            difference = _largest_difference(tokens.logprobs, recorded.logprobs)
        equal = None if digest is None else taken.result.weights == digest
        return cls(
            step=step,
            weights=taken.result.weights,
            weights_equal=equal,
            advantages_equal=advantages,
            logprobs_equal=logprobs,
            logprob_difference=difference,
        )

    @property
    def sentence(self) -> str:
        """The outcome, for a person."""
        if self.weights_equal:
            return f"step {self.step}: the weights are equal, {self.weights}"
        known = "no digest was recorded" if self.weights_equal is None else "the weights differ"
        if self.advantages_equal is None:
            return f"step {self.step}: {known}"
        advantages = "equal" if self.advantages_equal else "different"
        logprobs = "equal" if self.logprobs_equal else f"up to {self.logprob_difference:.3g} apart"
        return f"step {self.step}: {known}; the advantages are {advantages}, the trainer's logprobs {logprobs}"


def _same_bits(one: Any, other: Any) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def _largest_difference(one: Any, other: Any) -> float:
    if one.shape != other.shape:
        return math.nan
    apart = np.abs(one.astype(np.float64) - other)
    return float(np.nanmax(apart)) if np.isfinite(apart).any() else math.nan


@dataclass(kw_only=True, eq=False)
class Replay:
    """A replay, in a folder of its own.

    Example:
        replay = Replay(plan=plan, device="cpu", folder=folder, report=print)
        outcome = asyncio.run(replay.run())
    """

    plan: ReplayPlan
    device: str
    folder: Path
    report: Callable[[str], None]
    varied: Sequence[ConfigSpan] | None = None
    """The steps with other values of the config; None: only as they were taken."""
    keeps_checkpoint: bool = False
    """True if a checkpoint of the last step stays, to be evaluated."""
    checks: list[StepCheck] = field(default_factory=list, init=False)
    """The steps as they were taken."""
    _last: dict[str, float] = field(default_factory=dict, init=False)
    """The metrics of the last step that tell two trainings apart."""
    _policy_differences: dict[int, tuple[float, float]] = field(default_factory=dict, init=False)

    async def run(self) -> dict[str, Any]:
        """Take all steps on a cluster of its own. Return the outcome as summary.json has it."""
        async with cluster(_resources(self.plan.config, 1 if self.varied is None else 2), self.device):
            return await self.take_all()

    async def take_all(self) -> dict[str, Any]:
        """Take all steps on the connected cluster."""
        started = time.perf_counter()
        plan, metrics = self.plan, JsonlSink(self.folder / METRICS_FILE)
        original = self._trainer(plan.spans, "original")
        variant = None if self.varied is None else self._trainer(self.varied, "variant")
        checkpoint = None if plan.checkpoint is None else plan.checkpoint.train_folder
        try:
            origin, *_ = await asyncio.gather(*(each.start(checkpoint) for each in (original, variant) if each))
            reasons = self._reasons(origin)
            for step in range(plan.start + 1, plan.last + 1):
                row = await self._take(step, original, variant)
                if step >= plan.first:
                    metrics.log(step, row)
                    self._last = {name: row[name] for name in SHOWN if name in row}
            if self.keeps_checkpoint:
                await (variant or original).save_checkpoint(self.folder, plan.last)
        finally:
            for each in (original, variant):
                if each is not None:
                    each.close()
        return self._outcome(reasons, time.perf_counter() - started)

    def _trainer(self, spans: Sequence[ConfigSpan], name: str) -> ReplayTrainer:
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        return ReplayTrainer(config=spans[0].config, device=self.device, model=self.plan.model, folder=folder)

    def _reasons(self, origin: Origin) -> list[str]:
        """Return the reasons why the weights cannot be equal here; none if they must be equal.

        Raises:
            ConfigError: the replay does not start with the weights of the run.
        """
        plan, here = self.plan, asdict(origin)
        there = [plan.chain.origin_of(step) for step in range(plan.start + 1, plan.last + 1)]
        reasons = list(dict.fromkeys(reason for each in there for reason in differences(each, here)))
        if self.device == "cuda":
            reasons.append("kernels of a GPU may add in another order each time")
        if not plan.chain.weights:
            reasons.append("the run has no proof.jsonl, and so no digest of its weights")
        expected = plan.chain.weights.get(plan.start)
        is_drawn = bool(reasons) and plan.config.model.lora.rank is not None  # factors, by this torch
        if expected not in (None, origin.weights) and not is_drawn:
            start = plan.model if plan.checkpoint is None else plan.checkpoint.path
            raise ConfigError(
                f"{start}: its weights have the digest {origin.weights}, and those of the run had {expected} after "
                f"step {plan.start}: they are others"
            )
        if reasons:
            bound = "the replay tells how far it comes to be from the run instead"
            self.report(f"equal bits cannot be expected ({'; '.join(reasons)}): {bound}")
        return reasons

    async def _take(self, step: int, original: ReplayTrainer, variant: ReplayTrainer | None) -> dict[str, float]:
        """Take one step. Return its metrics."""
        started = time.perf_counter()
        recorded = await asyncio.to_thread(read_step, self.plan.run, step)
        await _change_config(original, self.plan.spans, step)
        if variant is not None and self.varied is not None:
            await _change_config(variant, self.varied, step)
            taken, theirs = await asyncio.gather(variant.take(recorded, step - 1), original.take(recorded, step - 1))
        else:
            taken = theirs = await original.take(recorded, step - 1)
        check = StepCheck.of(step, theirs, recorded, self.plan.chain.weights.get(step))
        row = to_floats(taken.result.metrics)
        if variant is None:
            row |= {"replay/logprob_difference": check.logprob_difference}
            if check.weights_equal is not None:
                row["replay/weights_equal"] = float(check.weights_equal)
        else:
            row |= await self._compared(step, recorded, taken, variant, original)
        if step >= self.plan.first:
            self.checks.append(check)
            if not check.weights_equal:
                await self._bound(step, original)
            if variant is None or check.weights_equal is False:
                self.report(check.sentence)
        row = {name: value for name, value in row.items() if not math.isnan(value)}
        return row | {"timing_s/step": time.perf_counter() - started}

    async def _compared(
        self, step: int, recorded: RecordedStep, taken: ReplayedStep, variant: ReplayTrainer, original: ReplayTrainer
    ) -> dict[str, float]:
        """Compare a step with the original's."""
        similarity = await variant.similarity(original)
        row = StepCheck.of(step, taken, recorded, None)
        values = {
            "replay/gradient_cosine": similarity.cosine,
            "replay/weights_distance": similarity.relative_distance,
            "replay/logprob_difference": row.logprob_difference,
            "replay/masked_fraction": _masked_fraction(taken),
        }
        if step >= self.plan.first:
            metrics = to_floats(taken.result.metrics) | values
            known = {name: metrics.get(key, math.nan) for key, name in SHOWN.items()}
            shown = [f"{name} {value:.4g}" for name, value in known.items() if not math.isnan(value)]
            self.report(f"step {step}: {', '.join(shown)}")
        return values

    async def _bound(self, step: int, original: ReplayTrainer) -> None:
        """Compare the policy with the run's checkpoint of that step, if there is one."""
        path = self.plan.run.folder / CHECKPOINTS / f"step_{step:06d}"
        if not path.is_dir():
            return
        try:
            self._policy_differences[step] = await original.policy_difference(verified(path))
        except CheckpointError as error:
            self.report(f"step {step}: not compared with its checkpoint: {error}")

    def _outcome(self, reasons: Sequence[str], seconds: float) -> dict[str, Any]:
        plan, differing = self.plan, [check for check in self.checks if check.weights_equal is False]
        differences_of_logprobs = [c.logprob_difference for c in self.checks if not math.isnan(c.logprob_difference)]
        start = plan.model if plan.checkpoint is None else str(plan.checkpoint.path)
        return {
            "replay_of": str(plan.run.folder),
            "first": plan.first,
            "last": plan.last,
            "start": start,
            "equality_expected": not reasons,
            "reasons": list(reasons),
            "steps": len(self.checks),
            "equal": sum(check.weights_equal is True for check in self.checks),
            "differing": len(differing),
            "first_difference": asdict(differing[0]) if differing else None,
            "logprob_difference": max(differences_of_logprobs, default=None),
            "policy_differences": {
                str(step): {"largest": largest, "relative": relative}
                for step, (largest, relative) in self._policy_differences.items()
            },
            "weights": self.checks[-1].weights,
            "last_step": self._last,
            "seconds": round(seconds, 3),
        }


async def _change_config(trainer: ReplayTrainer, spans: Sequence[ConfigSpan], step: int) -> None:
    """Switch the trainer to the config of the step, if it differs from the present one."""
    config = next(span.config for span in spans if span.first <= step <= span.last)
    if config != trainer.config:
        await trainer.go_on_with(config)


def _resources(config: Config, num_trainings: int) -> Config:
    """Return a config that claims the cluster resources of the replay."""
    rollout = replace(config.rollout, num_replicas=0, num_agent_workers=0)
    trainer = replace(config.trainer, num_ranks=num_trainings * config.trainer.num_ranks)
    return replace(config, rollout=rollout, trainer=trainer, teacher=replace(config.teacher, path=None))


def _masked_fraction(taken: ReplayedStep) -> float:
    """Return the share of the computed tokens that the policy loss left out."""
    tokens = taken.assembled.sampled(taken.result)
    if tokens is None or not (is_computed := ~np.isnan(tokens.logprobs)).any():
        return math.nan
    return float(tokens.is_rejected[is_computed].mean())


SHOWN = {
    "actor/ess": "ess",
    "actor/pg_clipfrac": "clipped",
    "replay/masked_fraction": "masked",
    "replay/gradient_cosine": "gradient cosine",
    "replay/weights_distance": "weights apart",
}


def sentence(outcome: Mapping[str, Any]) -> str:
    """Return the outcome of a replay in one line."""
    steps, equal, first = outcome["steps"], outcome["equal"], outcome["first_difference"]
    name = Path(outcome["replay_of"]).name
    if equal == steps:
        return f"replay of {name}: all {steps} steps gave the run's weights, bit for bit"
    apart = outcome["logprob_difference"]
    bound = "" if apart is None else f"; the trainer's logprobs are at most {apart:.3g} apart"
    if outcome["policy_differences"]:
        step, difference = list(outcome["policy_differences"].items())[-1]
        bound += (
            f", the policies after step {step} {difference['relative']:.3g} of their norm and "
            f"{difference['largest']:.3g} in a weight"
        )
    if first is None:
        return f"replay of {name}: {equal} of {steps} steps are known to be equal, the others have no digest{bound}"
    return f"replay of {name}: {equal} of {steps} steps are equal, the first that differs is {first['step']}{bound}"
