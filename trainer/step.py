"""Turn the groups of a step into what the train workers compute.

Everything that decides what a step learns is here, so that a run and its replay take the same steps.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np

from configs.schema import Config
from configs.validate import ConfigError
from rollout.types import BoolArray, FloatArray, TrajectoryGroup
from trainer.advantages.credit import Credit, assign_credit, is_credited, needs_scores, no_credit, trainable
from trainer.batch import StepBatch, StepResult, assemble_for
from trainer.mini_batches import mini_batched
from trainer.old_logprobs import MixedBatch, OldLogprobs, mixed_batch, old_metrics
from trainer.supervised.demonstrations import DemonstrationStream, beside, supervised_batch
from trainer.tokens import TrainedTokens, sampled_tokens
from trainer.tracking.events.kinds import StepPart

Score = Callable[[StepBatch], Awaitable[dict[str, FloatArray]]]
"""Returns what advantages depend on, by name, [T] over the loss tokens (`TrainWorker.score`)."""
ScoreOld = Callable[[MixedBatch], Awaitable[OldLogprobs]]
"""Returns what the versions that sampled the tokens say of them (`TrainWorker.old_logprobs`)."""
TimePart = Callable[[StepPart], AbstractContextManager[None]]
"""Counts the seconds of a block as a part of the step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AssembledStep:
    """A step before it is trained."""

    batch: StepBatch | None
    """The micro-batches; None for a step that is only counted, because of `broken`."""
    credit: Credit
    broken: str | None = None
    """The trajectories with a rollout logprob that is not finite."""
    is_credited: BoolArray | None = None
    """[T] bool, of the loss tokens of all groups: those of `credit`, whose trajectories take part in the loss."""

    def sampled(self, result: StepResult) -> TrainedTokens | None:
        """Return the training signals [T] of all loss tokens of the groups. The demonstrations follow the groups'
        tokens, and are not part of the records."""
        if result.tokens is None:
            return None
        tokens = result.tokens.first(len(self.credit.tokens.targets))
        tokens = replace(tokens, old_logprobs=self.credit.tokens.old_logprobs)
        return tokens if self.is_credited is None else tokens.spread(self.is_credited)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAssembler:
    """Makes the micro-batches of a step, with what every token learns.

    Example:
        step = await assembler.assemble(groups, global_steps=7)
        result = await workers.train_step(step.batch, 7)
    """

    config: Config
    score: Score
    old_logprobs: ScoreOld | None = None
    """None: what the versions that sampled say is not computed, and comes with the records."""
    demonstrations: DemonstrationStream | None = None
    """The conversations that are learned beside the groups, with algorithm.ce_coef."""
    is_supervised: bool = False
    """True if the groups are demonstrations themselves."""

    async def assemble(
        self,
        groups: Sequence[TrajectoryGroup],
        global_steps: int,
        part: TimePart = lambda part: nullcontext(),
        *,
        early: OldLogprobs | None = None,
        recorded: FloatArray | None = None,
    ) -> AssembledStep:
        """Assemble the step that `global_steps` others precede.

        Args:
            early: with algorithm.proximal=exact, what is known already of the tokens of `groups`.
            recorded: with algorithm.proximal=exact, the `old_logprobs` of all loss tokens, if they are known.
        """
        if (broken := broken_rollouts(groups)) is not None:
            return AssembledStep(batch=None, credit=no_credit(groups), broken=broken)
        if self.is_supervised:
            with part(StepPart.assemble):
                batch = supervised_batch(groups, self.config, global_steps)
                return AssembledStep(batch=batch, credit=no_credit(groups))
        algorithm = self.config.algorithm
        with part(StepPart.assemble):
            tokens, scores = sampled_tokens(groups, global_steps, self.config.weight_sync.interval), {}
        if needs_scores(algorithm):
            with part(StepPart.score):
                scores = await self.score(assemble_for(self.config.trainer, groups, tokens, keep_idle=True))
        with part(StepPart.assemble):
            credited = is_credited(groups, tokens, algorithm.mask_truncated)
            tokens = tokens if early is None else early.signals(tokens)
            credit = assign_credit(groups, tokens, scores, self.config, global_steps)
            trained = trainable(groups, algorithm.mask_truncated)
        if algorithm.needs_old_versions and recorded is not None:
            if len(recorded) == len(credited):  # earlier versions recorded those of credited tokens only
                recorded = recorded[credited]
            credit = replace(credit, tokens=replace(credit.tokens, old_logprobs=recorded))
        elif algorithm.needs_old_versions:
            credit = await self._scored_by_own_versions(trained, credit, early, global_steps, part)
        with part(StepPart.assemble):
            tokens = credit.tokens
            if self.demonstrations is not None:
                learned = self.demonstrations.batch(global_steps, self.config.sft.per_step)
                trained, tokens = beside(trained, tokens, learned)
            batch = mini_batched(trained, tokens, self.config, global_steps)
            return AssembledStep(batch=batch, credit=credit, is_credited=credited)

    async def _scored_by_own_versions(
        self,
        groups: Sequence[TrajectoryGroup],
        credit: Credit,
        early: OldLogprobs | None,
        global_steps: int,
        part: TimePart,
    ) -> Credit:
        """Return the credit with the `old_logprobs` of stale tokens, and their metrics."""
        if self.old_logprobs is None:
            reason = "the versions that sampled the tokens are not here, and nothing recorded says what they computed"
            raise ConfigError(f"algorithm.proximal=exact: {reason}")
        with part(StepPart.assemble):
            mixed = mixed_batch(groups, credit.tokens, self.config, global_steps)
        old = OldLogprobs.none(len(credit.tokens.targets))
        if mixed is not None:
            with part(StepPart.score):
                old = await self.old_logprobs(mixed)
        metrics = old_metrics([old] if early is None else [early, old])
        return replace(credit, tokens=old.signals(credit.tokens), metrics=credit.metrics | metrics)


def broken_rollouts(groups: Sequence[TrajectoryGroup]) -> str | None:
    """Name the trajectories with a sampled token whose rollout logprob is not finite; None if there is none."""
    broken = [
        f"{trajectory.replica}, prompt {group.prompt.ordinal}, trajectory {index}"
        for group in groups
        for index, trajectory in enumerate(group.trajectories)
        if not all(np.isfinite(s.rollout_logprobs[s.loss_mask]).all() for s in trajectory.sequences)
    ]
    return f"rollout logprobs are not finite: {'; '.join(broken)}" if broken else None
