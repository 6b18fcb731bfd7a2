"""The order of rows that learns from what became of its prompts, with its whole state in the checkpoint."""

from array import array
from collections.abc import Collection, Sequence

import numpy as np

from configs.runtime.dotted import find
from configs.schema import Config
from rollout.curriculum.choosers import Chooser, Custom, Draw, Frontier, Retry, Stages
from rollout.curriculum.levels import levels_of
from rollout.curriculum.order import CurriculumState, Order, OtherPromptsError, Uniform
from rollout.curriculum.passes import PassRates
from rollout.types import Prompt

ORDER_PARAMETERS = ("rows", "passes", "random")
"""The parameters of a user's function: the prompts of all rows, a `PassRatesView` of theirs and a numpy generator."""


class Adaptive:
    """Lets a chooser decide each row at the draw, and remembers it until the ordinal is over.

    What it draws depends on the seed, on the ordinals and on the outcomes that were told before each draw, in their
    order. So a run that is killed and resumed draws as if it had not been, as far as the same becomes of its prompts.

    Example:
        order = Adaptive("frontier", Frontier(100, seed=0), PassRates(100, half_life=1000), seed=0, pass_reward=0.5)
        order.draw(0)
        order.row(0)                   # 63, say
        order.tell(0, [1.0, 0.0])      # one of two responses passed
        state = order.state(live=[])   # no ordinal is ready or under way
    """

    def __init__(self, name: str, chooser: Chooser, passes: PassRates, *, seed: int, pass_reward: float):
        self._name = name
        self._chooser = chooser
        self._passes = passes
        self._seed = seed
        self._pass_reward = pass_reward
        self._first, self._rows = 0, array("i")
        """The rows of the ordinals from the first on: all that this process has drawn."""
        self._open: dict[int, int] = {}
        """The rows of the ordinals whose outcome was not told yet."""
        self._variances: list[float] = []
        """The expected variances of the rows drawn since the last call of `gauges`, at their draws."""

    @property
    def _next(self) -> int:
        return self._first + len(self._rows)

    def draw(self, ordinal: int) -> None:
        """Choose the row of the next ordinal."""
        assert ordinal == self._next, f"ordinal {ordinal} is drawn after {self._next - 1}"
        random = np.random.default_rng([self._seed, ordinal])
        busy = frozenset(self._open.values())
        row = self._chooser.choose(Draw(ordinal, self._passes, busy, random))
        self._variances.append(float(self._passes.variance(np.array([row], np.int32))[0]))
        self._passes.visit(row)
        self._rows.append(row)
        self._open[ordinal] = row

    def row(self, ordinal: int) -> int:
        if not self._first <= ordinal < self._next:
            raise LookupError(f"ordinal {ordinal}: its row is known from {self._first} to {self._next - 1} only")
        return self._rows[ordinal - self._first]

    def tell(self, ordinal: int, rewards: Sequence[float]) -> None:
        """Count the responses that passed."""
        row = self._open.pop(ordinal, None)
        if row is None:
            return
        passed = sum(reward >= self._pass_reward for reward in rewards)
        failed = len(rewards) - passed
        if rewards:
            self._passes.tell(row, passed, failed)
        self._chooser.tell(ordinal, row, passed, failed, self._next)

    def gauges(self) -> dict[str, float]:
        visits, rate = self._passes.visits, self._passes.rate()
        drawn, self._variances = self._variances, []
        gauges = {
            "curriculum/visits": float(visits.sum()),
            "curriculum/visits_max": float(visits.max()),
            "curriculum/unseen_fraction": float((visits == 0).mean()),
            **self._chooser.gauges(),
        }
        if (visits > 0).any():
            gauges["curriculum/pass_rate"] = float(rate[visits > 0].mean())
        if drawn:
            gauges["curriculum/drawn_variance"] = float(np.mean(drawn))
        return gauges

    def state(self, live: Collection[int]) -> CurriculumState:
        of_rows, of_pools = self._passes.evidence()
        first = min(live, default=self._next)
        return CurriculumState(
            order=self._name,
            pools=self._passes.checksum,
            first=first,
            rows=np.array(self._rows[first - self._first :], np.int32),
            open=tuple(sorted(self._open)),
            clock=self._passes.clock,
            visits=self._passes.visits.copy(),
            of_rows=of_rows,
            of_pools=of_pools,
            cursor=self._chooser.cursor,
        )

    def restore(self, state: CurriculumState | None) -> None:
        drawn_with = "uniform" if state is None else state.order
        if state is None or drawn_with != self._name:
            raise OtherPromptsError(
                f"data.curriculum.order={self._name}: the prompts of the checkpoint were drawn with {drawn_with}"
            )
        if state.pools != self._passes.checksum:
            raise OtherPromptsError("data.curriculum.key: the checkpoint's column has other values")
        self._first, self._rows = state.first, array("i", state.rows.tolist())
        self._open = {ordinal: self.row(ordinal) for ordinal in state.open}
        self._passes.restore(state.clock, state.visits, state.of_rows, state.of_pools)
        self._chooser.cursor = state.cursor


def make_order(config: Config, rows: Sequence[Prompt], share: float = 1.0) -> Order:
    """Return the order of these rows. Raises ValueError for rows without the column that it needs.

    Args:
        share: the part of the trained groups that they make, if there are other sources of prompts.
    """
    curriculum, seed = config.data.curriculum, config.seed
    name = curriculum.order
    if name == "uniform":
        return Uniform(len(rows), seed)
    pools = None if curriculum.key is None else levels_of([row.extra for row in rows], curriculum.key)
    match name:
        case "frontier":
            chooser = Frontier(len(rows), seed)
        case "stages":
            assert pools is not None, "checked with the config"
            chooser = Stages(pools, seed, curriculum.stage_pass_rate)
        case "retry":
            chooser = Retry(len(rows), seed, curriculum.retry_after)
        case _:
            chooser = Custom(name, find("data.curriculum.order", name, ORDER_PARAMETERS), rows)
    half_life = curriculum.half_life * config.trainer.prompts_per_step * share
    passes = PassRates(len(rows), half_life, pools)
    return Adaptive(name, chooser, passes, seed=seed, pass_reward=curriculum.pass_reward)
