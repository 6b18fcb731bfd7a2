"""Values of the curriculum that contradict one another, or that its order does not read."""

from collections.abc import Iterator

from configs.checks.problem import Problem, dotted_problems
from configs.data import ORDERS, CurriculumConfig
from configs.schema import Config

READS: dict[str, tuple[str, ...]] = {
    "uniform": (),
    "frontier": ("key", "pass_reward", "half_life"),
    "stages": ("key", "pass_reward", "stage_pass_rate"),
    "retry": ("pass_reward", "retry_after"),
}
"""The keys besides `order` that an order reads."""
OF_FUNCTIONS = ("key", "pass_reward", "half_life")
"""The keys that decide what a user's function is told."""


def curriculum_problems(config: Config) -> Iterator[Problem]:
    curriculum = config.data.curriculum
    order = curriculum.order
    yield from dotted_problems("data.curriculum.order", order, ORDERS, ("rows", "passes", "random"))
    for key in ("key", "pass_reward", "half_life", "stage_pass_rate", "retry_after"):
        is_set = getattr(curriculum, key) != getattr(CurriculumConfig(), key)
        if is_set and key not in READS.get(order, OF_FUNCTIONS):
            readers = [name for name, keys in READS.items() if key in keys]
            own = ", or to a function of your own" if key in OF_FUNCTIONS else ""
            allowed = f"data.curriculum.order={order} does not read it; set that to {' or '.join(readers)}{own}"
            yield Problem(f"data.curriculum.{key}", allowed)
    if order == "stages" and curriculum.key is None:
        yield Problem("data.curriculum.key", "data.curriculum.order=stages needs the column of the difficulty")
    elif curriculum.key is not None and config.data.train_files is None:
        yield Problem("data.curriculum.key", "needs data.train_files: generated problems have no columns")
