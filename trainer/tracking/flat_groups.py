"""Says once when most groups teach nothing."""

from collections import deque
from collections.abc import Callable, Mapping

STEPS = 10
"""Of the latest optimizer steps the mean share counts: one step alone says little."""
TOO_MANY = 0.5
"""Share of groups without a gradient beyond which it is said."""


class FlatGroups:
    """Watches the share of groups whose advantages are all 0, because all their rewards are equal.

    Such a group is sampled and counted as any other, but has no gradient.

    Example:
        flat_groups = FlatGroups(console.message)
        flat_groups.watch(7, metrics)  # of optimizer step 7
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._latest: deque[tuple[float, float, float]] = deque(maxlen=STEPS)
        self._is_said = False

    def watch(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step."""
        if self._is_said or "rollout/zero_variance_groups" not in metrics:
            return
        solved = metrics["rollout/solve_all"], metrics["rollout/solve_none"]
        self._latest.append((metrics["rollout/zero_variance_groups"], *solved))
        flat, solved, unsolved = (sum(column) / STEPS for column in zip(*self._latest, strict=True))
        if len(self._latest) == STEPS and flat > TOO_MANY:
            self._is_said = True
            self._report(
                f"steps {step - STEPS + 1} to {step}: {flat:.0%} of the groups had equal rewards and no gradient "
                f"({solved:.0%} were solved by every trajectory, {unsolved:.0%} by none). "
                "algorithm.filter_groups=true samples other prompts in their place; harder or easier prompts "
                "(data.train_files) or a larger algorithm.group_size make them rarer"
            )
