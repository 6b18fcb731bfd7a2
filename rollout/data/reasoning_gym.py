"""Tasks of the package reasoning-gym, as rows: a hundred kinds of verifiable problems, made from a seed.

data.loader=rollout.data.reasoning_gym:rows rollout.reward=rollout.data.reasoning_gym:score
"""

import importlib
import json
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from rollout.data.sources import DataError, Record, part_of
from rollout.rewards.base import RewardResult
from rollout.rewards.gsm8k import tagged_answer
from rollout.types import Prompt

TASKS = "data.loader_args.tasks"
MAX_DRAWS = 20
"""The draws per problem that is wanted: a task of small numbers repeats itself."""
RIGHT_SHARE = 0.8
"""The share of the demonstrations that come first, which are all right."""
HASTINESS = 0.75
"""The share of hasty answers among the rest."""
RIGHT = 1.0
"""The score of a right answer."""
Tasks = Mapping[str, Mapping[str, Any]]
"""The arguments of each task's config, by its name: {"chain_sum": {"max_terms": 3}, "gcd": {}}."""


def rows(entries: str, *, tasks: Tasks, sizes: Mapping[str, int], data_seed: int = 0) -> list[Record]:
    """Return the problems of one part, such as `train`, the tasks by turns. No two parts have a question in common.

    Args:
        entries: data.train_files or data.val_files: the name of a part.
        sizes: problems of each part. They are drawn in this order, so that a part is the same whatever comes after it.

    Each row has `question`, `answer`, `data_source` (its task), and what the reward needs: the `config` of the task and
    the `entry` as the package made it. Raises DataError, and ImportError where the package is missing.
    """
    places = part_of(entries, sizes)
    if not tasks:
        raise DataError(f"{TASKS}: names no task")
    share = -(-sum(sizes.values()) // len(tasks))
    by_task = [_drawn(task, dict(config), share, data_seed) for task, config in tasks.items()]
    return [by_task[place % len(by_task)][place // len(by_task)] for place in places]


def demonstrations(
    num: int, seed: int, *, tasks: Tasks, sizes: Mapping[str, int], data_seed: int = 0
) -> list[tuple[str, str]]:
    """Return `num` pairs of a question and an answer, drawn with replacement from the part `train`, for a tiny model's
    warm-up (data.demonstrations): first right answers, which teach to solve the problems, then mostly hasty ones, which
    leave something for reinforcement learning to improve. An answer begins with a space, as words within a question do:
    to a tokenizer they are other words without it. Raises as `rows` does."""
    problems, rng = rows("train", tasks=tasks, sizes=sizes, data_seed=data_seed), random.Random(seed)
    answers = {task: {row["answer"]: None for row in problems if row["data_source"] == task} for task in tasks}

    def answer(place: int, row: Record) -> str:
        is_right = place < RIGHT_SHARE * num or rng.random() > HASTINESS
        return row["answer"] if is_right else _hasty(row["question"], list(answers[row["data_source"]]))

    return [(row["question"], f" {answer(place, row)}") for place, row in enumerate(rng.choices(problems, k=num))]


def _hasty(question: str, answers: Sequence[str]) -> str:
    """Return the word of the question that comes last of those that answer any problem of the task; without one, the
    first answer of all. Example: _hasty("... (Answer Yes or No)", ["Yes", "No"]) == "No"
    """
    by_place = {place: answer for answer in answers if (place := question.rfind(answer)) >= 0}
    return by_place[max(by_place)] if by_place else answers[0]


def score(prompt: Prompt, text: str) -> RewardResult:
    """Score from 0 to 1, as the task of the row does: some give part of it. The answer is what is between the last
    <answer> tags, or else the whole text.

    Raises:
        KeyError: The row does not come from `rows`.
        ImportError: The package is missing.
    """
    if not {"entry", "config"} <= set(prompt.extra):
        raise KeyError("the row has no columns `entry` and `config`: set data.loader=rollout.data.reasoning_gym:rows")
    answer, entry = tagged_answer(text), prompt.extra["entry"]
    judge = dataset(prompt.data_source, {**prompt.extra["config"], "seed": 0, "size": 1})  # it draws no problem
    reward = float(judge.score_answer(answer, entry))
    return RewardResult(reward=reward, accuracy=float(reward >= RIGHT), answer=answer)


def dataset(task: str, config: Mapping[str, Any]) -> Any:
    """Return the package's own data set of a task, which also scores its answers. Raises DataError, and ImportError
    where the package is missing."""
    return _dataset(task, json.dumps(dict(config), sort_keys=True))


@lru_cache(maxsize=256)
def _dataset(task: str, config: str) -> Any:
    try:
        package: Any = importlib.import_module("reasoning_gym")  # takes a second
    except ImportError as error:
        raise ImportError(f"tasks of reasoning-gym need the package: pip install reasoning-gym ({error})") from error
    try:
        return package.create_dataset(task, **json.loads(config))
    except Exception as error:  # its configs raise what they like: TypeError for no such argument, AssertionError
        raise DataError(f"{TASKS}.{task}={config}: {type(error).__name__}: {error}") from error


def _drawn(task: str, config: dict[str, Any], count: int, seed: int) -> list[Record]:
    """Draw distinct problems."""
    made = dataset(task, {**config, "seed": seed, "size": MAX_DRAWS * count})
    drawn: dict[str, Record] = {}
    for index in range(MAX_DRAWS * count):
        if len(drawn) == count:
            return list(drawn.values())
        entry = made[index]
        answer = "" if entry["answer"] is None else str(entry["answer"])  # some tasks have no single right one
        row = {"answer": answer, "data_source": task, "config": config, "entry": entry}
        drawn.setdefault(entry["question"], {"question": entry["question"], **row})
    if len(drawn) < count:
        raise DataError(f"{TASKS}.{task}={config}: has {len(drawn)} distinct problems, and {count} are wanted")
    return list(drawn.values())
