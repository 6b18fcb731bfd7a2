"""Budgets of a run for rewards and for groups that fail."""

from collections.abc import Iterable

from configs.schema import Config


class RewardFailuresError(RuntimeError):
    """More rewards failed than rollout.max_failed_rewards allows. The message has the first failure."""


class FailureBudget:
    """Counts failed rewards, of training and of evaluation."""

    def __init__(self, share: float = 0.0, num_trajectories: int = 0):
        """`share`: rollout.max_failed_rewards, of the run's `num_trajectories`."""
        self._share = share
        self._num_trajectories = num_trajectories
        self._first = ""
        self.num_failed = 0

    def count(self, errors: Iterable[str | None]) -> None:
        """`errors`: one per reward, None if it succeeded. Raises RewardFailuresError past the budget."""
        for error in errors:
            if error is not None:
                self._first = self._first or error
                self.num_failed += 1
        if self.num_failed > self._share * self._num_trajectories:
            raise RewardFailuresError(
                f"{self.num_failed} rewards failed, more than rollout.max_failed_rewards={self._share:g} of the run's "
                f"{self._num_trajectories} trajectories; the first: {self._first}"
            )

    def gauges(self) -> dict[str, float]:
        return {"rollout/failed_rewards": self.num_failed}


class GroupFailuresError(RuntimeError):
    """More groups failed than rollout.max_failed_groups allows. The message has the first failure."""


class GroupBudget:
    """Decides whether a group that failed is tried again, and counts those that are given up."""

    def __init__(self, max_retries: int = 0, share: float = 0.0, num_groups: int = 0):
        """`max_retries`: rollout.max_group_retries. `share`: rollout.max_failed_groups, of the run's `num_groups`."""
        self._max_retries = max_retries
        self._share = share
        self._num_groups = num_groups
        self._first: tuple[str, BaseException] | None = None
        self.num_retried = 0
        self.failed: list[int] = []
        """Ordinals of the prompts that were given up."""

    def gives_up(self, ordinal: int, failures: int, error: Exception) -> bool:
        """Whether the prompt that failed `failures` times is given up. Raises GroupFailuresError past the budget."""
        if failures <= self._max_retries:
            self.num_retried += 1
            return False
        self.failed.append(ordinal)
        self._first = self._first or (f"prompt {ordinal}: {type(error).__name__}: {error}", error)
        if len(self.failed) > self._share * self._num_groups:
            what, first = self._first
            raise GroupFailuresError(
                f"{len(self.failed)} groups failed, each {failures} times, more than rollout.max_failed_groups="
                f"{self._share:g} of the run's {self._num_groups}; the first: {what}"
            ) from first
        return True

    def gauges(self) -> dict[str, float]:
        return {"rollout/failed_groups": len(self.failed), "rollout/retried_groups": self.num_retried}


def group_budget(config: Config) -> GroupBudget:
    num_groups = config.trainer.total_steps * config.trainer.prompts_per_step
    return GroupBudget(config.rollout.max_group_retries, config.rollout.max_failed_groups, num_groups)


def failure_budget(config: Config) -> FailureBudget:
    num_groups = config.trainer.total_steps * config.trainer.prompts_per_step
    return FailureBudget(config.rollout.max_failed_rewards, num_groups * config.algorithm.group_size)
