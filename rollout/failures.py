"""Budgets of a run for rewards and for groups that fail."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from configs.schema import Config


class RewardFailuresError(RuntimeError):
    """More rewards failed than rollout.max_failed_rewards allows. The message has the first failure."""


@dataclass(slots=True)
class FailureBudget:
    """Counts failed rewards, of training and of evaluation."""

    share: float = 0.0
    """rollout.max_failed_rewards, of `num_trajectories`."""
    num_trajectories: int = 0
    num_failed: int = 0
    _first: str = ""

    def count(self, errors: Iterable[str | None]) -> None:
        """`errors`: one per reward, None if it succeeded. Raises RewardFailuresError past the budget."""
        for error in errors:
            if error is not None:
                self._first = self._first or error
                self.num_failed += 1
        if self.num_failed > self.share * self.num_trajectories:
            raise RewardFailuresError(
                f"{self.num_failed} rewards failed, more than rollout.max_failed_rewards={self.share:g} of the run's "
                f"{self.num_trajectories} trajectories; the first: {self._first}"
            )

    def gauges(self) -> dict[str, float]:
        return {"rollout/failed_rewards": self.num_failed}


class GroupFailuresError(RuntimeError):
    """More groups failed than rollout.max_failed_groups allows. The message has the first failure."""


@dataclass(slots=True)
class GroupBudget:
    """Decides whether a group that failed is tried again, and counts those that are given up."""

    max_retries: int = 0
    """rollout.max_group_retries."""
    share: float = 0.0
    """rollout.max_failed_groups, of `num_groups`."""
    num_groups: int = 0
    num_retried: int = 0
    failed: list[int] = field(default_factory=list)
    """Ordinals of the prompts that were given up."""
    _first: tuple[str, BaseException] | None = None

    def gives_up(self, ordinal: int, failures: int, error: Exception) -> bool:
        """Whether the prompt that failed `failures` times is given up. Raises GroupFailuresError past the budget."""
        if failures <= self.max_retries:
            self.num_retried += 1
            return False
        self.failed.append(ordinal)
        self._first = self._first or (f"prompt {ordinal}: {type(error).__name__}: {error}", error)
        if len(self.failed) > self.share * self.num_groups:
            what, first = self._first
            raise GroupFailuresError(
                f"{len(self.failed)} groups failed, each {failures} times, more than rollout.max_failed_groups="
                f"{self.share:g} of the run's {self.num_groups}; the first: {what}"
            ) from first
        return True

    def gauges(self) -> dict[str, float]:
        return {"rollout/failed_groups": len(self.failed), "rollout/retried_groups": self.num_retried}


def failure_budgets(config: Config) -> tuple[FailureBudget, GroupBudget]:
    """The budgets of the run's rewards and of its groups."""
    rollout, num_groups = config.rollout, config.trainer.total_steps * config.trainer.prompts_per_step
    return (
        FailureBudget(rollout.max_failed_rewards, num_groups * config.algorithm.group_size),
        GroupBudget(rollout.max_group_retries, rollout.max_failed_groups, num_groups),
    )
