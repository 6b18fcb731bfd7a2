"""The budget of a run for rewards and for groups that fail."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from configs.mixture import sources_of
from configs.schema import Config


class RewardFailuresError(RuntimeError):
    """More rewards failed than rollout.max_failed_rewards allows. The message has the first failure."""


class GroupFailuresError(RuntimeError):
    """More groups failed than rollout.max_failed_groups allows. The message has the first failure."""


@dataclass(slots=True, kw_only=True)
class FailureBudget:
    """Counts the rewards and groups of a run that failed, those of evaluations included. By default none may fail."""

    num_trajectories: int = 0
    max_failed_rewards: float = 0.0
    """A share of `num_trajectories`."""
    num_groups: int = 0
    max_failed_groups: float = 0.0
    """A share of `num_groups`."""
    max_group_retries: int = 0
    failed_rewards: int = 0
    failed_groups: list[int] = field(default_factory=list)
    """Ordinals of the prompts that were given up."""
    retried_groups: int = 0
    _reward_sources: Counter[str] = field(default_factory=Counter)
    """The rewards that failed in this process by source, and `_group_sources` the groups."""
    _group_sources: Counter[str] = field(default_factory=Counter)
    _first_reward: str = ""
    _first_group: tuple[str, BaseException] | None = None

    def count_rewards(self, errors: Iterable[str | None], source: str = "") -> None:
        """Count rewards by their errors, None where one succeeded. `source`: that of their prompts in data.sources.
        Raises RewardFailuresError past the budget."""
        for error in errors:
            if error is not None:
                self._first_reward = self._first_reward or (f"{source}: {error}" if source else error)
                self.failed_rewards += 1
                self._reward_sources[source] += 1
        if self.failed_rewards > self.max_failed_rewards * self.num_trajectories:
            raise RewardFailuresError(
                f"{self.failed_rewards} rewards failed, more than rollout.max_failed_rewards="
                f"{self.max_failed_rewards:g} of the run's {self.num_trajectories} trajectories"
                f"{_by_source(self._reward_sources)}; the first: {self._first_reward}"
            )

    def gives_up(self, ordinal: int, failures: int, error: Exception, source: str = "") -> bool:
        """Return whether the prompt that failed `failures` times is given up. `source`: its own in data.sources. Raises
        GroupFailuresError past the budget."""
        if failures <= self.max_group_retries:
            self.retried_groups += 1
            return False
        self.failed_groups.append(ordinal)
        self._group_sources[source] += 1
        whose = f" of {source}" if source else ""
        self._first_group = self._first_group or (f"prompt {ordinal}{whose}: {type(error).__name__}: {error}", error)
        if len(self.failed_groups) > self.max_failed_groups * self.num_groups:
            what, first = self._first_group
            raise GroupFailuresError(
                f"{len(self.failed_groups)} groups failed, each {failures} times, more than rollout.max_failed_groups="
                f"{self.max_failed_groups:g} of the run's {self.num_groups}{_by_source(self._group_sources)}; the "
                f"first: {what}"
            ) from first
        return True

    def gauges(self) -> dict[str, float]:
        return {
            "rollout/failed_rewards": self.failed_rewards,
            "rollout/failed_groups": len(self.failed_groups),
            "rollout/retried_groups": self.retried_groups,
        }


def _by_source(counts: Counter[str]) -> str:
    """Return the counts in words, the largest first, where the run has data.sources: " (3 of search, 1 of agent)"."""
    named = [f"{count} of {source}" for source, count in counts.most_common() if source]
    return f" ({', '.join(named)})" if named else ""


def failure_budget(config: Config) -> FailureBudget:
    rollout, num_groups = config.rollout, config.trainer.total_steps * config.trainer.prompts_per_step
    sources = sources_of(config)
    mean_size = sum(each.weight * each.config.algorithm.group_size for each in sources) / sum(
        each.weight for each in sources
    )
    return FailureBudget(
        num_trajectories=round(num_groups * mean_size),
        max_failed_rewards=rollout.max_failed_rewards,
        num_groups=num_groups,
        max_failed_groups=rollout.max_failed_groups,
        max_group_retries=rollout.max_group_retries,
    )
