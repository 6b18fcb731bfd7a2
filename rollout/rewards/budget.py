"""How many rewards of a run may fail."""

from collections.abc import Iterable

from configs.schema import Config


class RewardFailuresError(RuntimeError):
    """More rewards failed than rollout.max_failed_rewards allows. The message has the first failure."""


class FailureBudget:
    """Counts the rewards that failed, of trajectories and evaluations alike, and remembers the first."""

    def __init__(self, share: float = 0.0, num_trajectories: int = 0):
        """`share`: rollout.max_failed_rewards, of the run's `num_trajectories`."""
        self._share = share
        self._num_trajectories = num_trajectories
        self._first = ""
        self.num_failed = 0

    def count(self, errors: Iterable[str | None]) -> None:
        """`errors`: one per reward, None for a good one. Raises RewardFailuresError past the budget."""
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


def failure_budget(config: Config) -> FailureBudget:
    num_groups = config.trainer.total_steps * config.trainer.prompts_per_step
    return FailureBudget(config.rollout.max_failed_rewards, num_groups * config.algorithm.group_size)
