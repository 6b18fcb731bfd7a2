"""The rows of a run: from files, or arithmetic problems made here."""

from configs.schema import Config
from rollout.data import files
from rollout.data.arithmetic import Problem
from rollout.prompts import Row
from scripts.models import arithmetic_problems


def load_rows(config: Config) -> tuple[list[Row], list[Row]]:
    """(train, held-out). Raises DataError for a file or a row that cannot be read."""
    data = config.data
    if data.train_files is None or data.val_files is None:
        train, val = ([_as_row(problem) for problem in problems] for problems in arithmetic_problems(config))
    else:
        train = files.load_rows(data.train_files, data.question_key, data.answer_key)
        val = files.load_rows(data.val_files, data.question_key, data.answer_key)
    return train, val[: data.num_val]


def _as_row(problem: Problem) -> Row:
    return Row(question=problem.question, ground_truth=files.final_answer(problem.answer))
