"""What the configs of a run say that its records must hold."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from configs.checkpoint import CONFIG_FILE, read_config
from configs.schema import StalePolicy
from trainer.tracking.set_aside import SET_ASIDE


class NoRunError(ValueError):
    """The folder holds no training run of this version. The message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a config says about the records."""

    total_steps: int
    prompts_per_step: int
    group_size: int
    interval: int
    max_staleness: int
    bounds_tokens: bool
    """Whether no token may be staler than `max_staleness`: not under `mask`, which takes them only out of the loss."""
    has_tokens: bool
    """Whether the trained tokens are recorded, and what replicas sample."""
    num_samples: int

    @classmethod
    def of(cls, config: DictConfig) -> Self:
        trainer, rollout = config.trainer, config.rollout
        return cls(
            total_steps=trainer.total_steps,
            prompts_per_step=trainer.prompts_per_step,
            group_size=config.algorithm.group_size,
            interval=config.weight_sync.interval,
            max_staleness=rollout.max_staleness,
            bounds_tokens=rollout.stale_policy != StalePolicy.mask.value,
            has_tokens=trainer.get("record_tokens", False),
            num_samples=config.evaluation.samples,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """The configs of all processes of a run: one that resumed may have had another than the one before it."""

    earlier: Sequence[tuple[int, Plan]]
    """(the step that the next process went on from, the config until then), in order of time."""
    last: Plan
    problems: tuple[str, ...] = ()
    """A sentence for each earlier config that cannot be read; its steps count as taken under the next one."""

    def of_step(self, step: int) -> Plan:
        """The config under which a step was taken, which is that of the last process that began before it."""
        plan = self.last
        for resumed_at, before in reversed(self.earlier):
            if resumed_at < step:
                break
            plan = before
        return plan

    @property
    def unrecorded_until(self) -> int:
        """The last step up to which a process recorded no tokens that the next one may have trained; 0 for none."""
        return max((resumed_at for resumed_at, before in self.earlier if not before.has_tokens), default=0)

    def of_evaluation(self, version: int) -> set[int]:
        """How many samples an evaluation may have of each prompt: one of the version that a process went on from was
        made by the process before it, or made up by that one."""
        resumed = (before for resumed_at, before in self.earlier if resumed_at == version)
        return {plan.num_samples for plan in (*resumed, self.of_step(version), self.of_step(version + 1))}


def read_plans(run_dir: Path) -> Plans:
    """Raises NoRunError."""
    earlier, problems = list[tuple[int, Plan]](), list[str]()
    for path in sorted((run_dir / SET_ASIDE).glob(f"*/{CONFIG_FILE}")):
        if (named := re.search(r"-step_(\d+)", path.parent.name)) is None:
            continue  # a person's folder
        try:
            earlier.append((int(named[1]), _plan(path)))
        except NoRunError as error:
            problems.append(f"an earlier config: {error}")
    return Plans(earlier=earlier, last=_plan(run_dir / CONFIG_FILE), problems=tuple(problems))


def _plan(path: Path) -> Plan:
    try:
        return Plan.of(read_config(path))
    except (AttributeError, TypeError, ValueError, OmegaConfBaseException) as error:
        raise NoRunError(f"{path.parent} holds no training run of this version: {error}") from error
