"""The question: how many rollouts does an order of the prompts save? Easy and hard problems, uniform against frontier.
Twenty minutes on two cores.

python -m scripts.bench.curriculum [--seeds 3]

The problems are word problems of two steps, which the warm model nearly always solves, and of three, at which it mostly
stops too early. A quarter is hard, in the training set as in the held-out set. The arms differ in data.curriculum only:

- uniform: every row once per epoch, shuffled.
- frontier: by what is known of each row alone.
- pooled: frontier, with the number of steps as data.curriculum.key.

The replicas are kept from arm to arm; each arm starts from the seed's warm model with new train workers. The last line
is JSON, with means over the seeds for each arm.

    rollouts_<arm>   trajectories trained until the first evaluation with a held-out accuracy of at least 0.95;
                     of a training that never gets there, all of its trajectories
    reached_<arm>    share of the trainings that get there
    accuracy_<arm>   held-out accuracy at the end
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from configs.checkpoint import CheckpointConfig
from configs.data import CurriculumConfig, DataConfig
from configs.schema import Config
from rollout.data.arithmetic import EVENTS, ITEMS, NAMES, OPENINGS, QUESTIONS, Problem, sloppy_answer
from scripts.bench.harness import make_parser
from scripts.bench.learning import train_all
from scripts.bench.trainings import Curve
from scripts.observe.tables import show_table, write_json

EASY, HARD = 2, 3
"""Steps of a problem."""
HARD_SHARE = 0.25
MAX_NUMBER = 9
SIZES = {"val": 256, "train": 1000}
"""Problems of each part, drawn in this order: the held-out ones are the same however many there are to train on."""
DATA_SEED = 4321
CLEAN_SHARE = 0.8
"""The share of the demonstrations that come first and are all right. Of the rest, hard ones stop early."""
STOP_EARLY = 0.8
TARGET = 0.95
"""The held-out accuracy to be reached."""
STEPS = 80
"""The optimizer steps of a training."""
ARMS = {
    "uniform": CurriculumConfig(),
    "frontier": CurriculumConfig(order="frontier"),
    "pooled": CurriculumConfig(order="frontier", key="steps"),
}


def load_problems(entries: str) -> list[dict[str, Any]]:
    """Return the rows of a part, `train` or `val` (data.loader). No two parts share a question."""
    rng, seen, parts = random.Random(DATA_SEED), set[str](), dict[str, list[dict[str, Any]]]()
    for part, size in SIZES.items():
        rows = parts.setdefault(part, [])
        while len(rows) < size:
            steps = HARD if len(rows) < HARD_SHARE * size else EASY
            problem = make_problem(rng, steps)
            if problem.question not in seen:
                seen.add(problem.question)
                rows.append({"question": problem.question, "answer": problem.answer, "steps": steps})
    return parts[entries]


def demonstrate(num: int, seed: int) -> list[tuple[str, str]]:
    """Return pairs of a question and an answer for the warm-up (data.demonstrations): right ones, then such that the
    model solves easy problems and mostly stops too early at hard ones."""
    rng, pairs = random.Random(seed), list[tuple[str, str]]()
    for number in range(num):
        steps = HARD if rng.random() < 0.5 else EASY
        problem = make_problem(rng, steps)
        is_sloppy = number >= CLEAN_SHARE * num and steps == HARD
        answer = problem.answer
        if is_sloppy:
            answer = sloppy_answer(problem, rng, stop_early=STOP_EARLY, slip=0.0, forget_marker=0.0)
        pairs.append((problem.question, answer))
    return pairs


def make_problem(rng: random.Random, num_steps: int) -> Problem:
    """Return a problem whose totals are never below zero."""
    total = rng.randint(1, MAX_NUMBER)
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    sentences, lines = [rng.choice(OPENINGS).format(name=name, number=total, item=item)], list[str]()
    for _ in range(num_steps):
        number = rng.randint(1, MAX_NUMBER)
        sign = rng.choice("+-") if number <= total else "+"
        sentences.append(rng.choice(EVENTS[sign]).format(name=name, number=number))
        after = total + number if sign == "+" else total - number
        lines.append(f"{total}{sign}{number}={after}")
        total = after
    sentences.append(rng.choice(QUESTIONS).format(name=name, item=item))
    return Problem(question=" ".join(sentences), answer="\n".join([*lines, f"#### {total}"]))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many: 0, 1, ...")
    num_seeds = parser.parse_args().seeds
    base = base_config(STEPS)
    arms = {name: replace(base, data=replace(base.data, curriculum=curriculum)) for name, curriculum in ARMS.items()}
    runs, curves = asyncio.run(train_all(base, arms, num_seeds))
    figures: dict[str, float] = {}
    rows = []
    for arm, of_arm in curves.items():
        needed = [rollouts_until(curve, TARGET) for curve in of_arm]
        rollouts = mean(count or max(curve.samples.values()) for count, curve in zip(needed, of_arm, strict=True))
        before, end = mean(curve.accuracy[0] for curve in of_arm), mean(runs.values("accuracy", arm))
        shown = ["not reached" if count is None else str(count) for count in needed]
        rows.append([arm, *shown, f"{rollouts:.0f}", f"{before:.3f}", f"{end:.3f}"])
        reached = mean(count is not None for count in needed)
        figures |= {f"rollouts_{arm}": rollouts, f"reached_{arm}": reached, f"accuracy_{arm}": end}
    seeds = [f"seed {seed}" for seed in range(num_seeds)]
    show_table(f"rollouts until {TARGET:g}", ["arm", *seeds, "mean", "accuracy before", "at the end"], rows)
    write_json(figures)


def base_config(steps: int) -> Config:
    """Return the config of all arms, which evaluates as often as an evaluation ends in time."""
    base = Config()
    data = DataConfig(
        train_files="train",
        val_files="val",
        loader=f"scripts.bench.curriculum:{load_problems.__name__}",
        demonstrations=f"scripts.bench.curriculum:{demonstrate.__name__}",
    )
    return replace(
        base,
        data=data,
        trainer=replace(base.trainer, total_steps=steps, eval_every=3),
        rollout=replace(base.rollout, max_response_tokens=40),
        checkpoint=CheckpointConfig(every=0),
    )


def rollouts_until(curve: Curve, target: float) -> int | None:
    """Return the trajectories trained before the first evaluation that reached the target. None: none did."""
    reached: Sequence[int] = [step for step in sorted(curve.accuracy) if curve.accuracy[step] >= target]
    return curve.samples[reached[0]] if reached else None


if __name__ == "__main__":
    main()
