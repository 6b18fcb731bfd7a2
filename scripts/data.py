"""The rows of a run: from files, or arithmetic problems made here."""

from configs.schema import Config
from rollout.data import rows
from rollout.data.arithmetic import Problem
from rollout.prompts import Row
from scripts.models import arithmetic_problems


def load_rows(config: Config) -> tuple[list[Row], list[Row]]:
    """(train, held-out). Raises DataError for data that cannot be read."""
    if config.data.train_files is None:
        train = [_as_row(problem) for problem in arithmetic_problems(config)[0]]
    else:
        train = _load(config, config.data.train_files)
    return train, held_out_rows(config)


def held_out_rows(config: Config) -> list[Row]:
    """Raises DataError for data that cannot be read."""
    if config.data.val_files is None:
        val = [_as_row(problem) for problem in arithmetic_problems(config)[1]]
    else:
        val = _load(config, config.data.val_files)
    return val[: config.data.num_val]


def _load(config: Config, entries: str) -> list[Row]:
    data = config.data
    return rows.load_rows(entries, rows.Columns(prompt=data.prompt_key, answer=data.answer_key), data.loader)


def _as_row(problem: Problem) -> Row:
    return Row(question=problem.question, ground_truth=rows.final_answer(problem.answer))
