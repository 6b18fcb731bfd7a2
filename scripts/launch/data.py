"""The rows of a run, from files or generated, and their prompts."""

from collections.abc import Sequence
from typing import Protocol

from configs.data import OverlongPrompts
from configs.schema import Config
from rollout.data import rows
from rollout.data.arithmetic import Problem
from rollout.prompts import EncodedRow, Row
from scripts.launch.models import arithmetic_problems


class Encoder(Protocol):
    async def encode(
        self, rows: Sequence[Row], template: str, chat_template: bool, max_tokens: int
    ) -> list[EncodedRow]: ...


class Screen(Protocol):
    def message(self, text: str) -> None: ...


def load_rows(config: Config) -> tuple[list[Row], list[Row]]:
    """Returns (train, held-out). Raises DataError for data that cannot be read."""
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


async def encode_rows(config: Config, encoder: Encoder, name: str, rows: list[Row], screen: Screen) -> list[EncodedRow]:
    """Encodes the prompts of the rows, and reports how many are too long.

    Raises:
        ValueError: one is too long and data.overlong_prompts=refuse, or none is left.
    """
    data = config.data
    kept = await encoder.encode(rows, data.prompt_template, data.chat_template, data.max_prompt_tokens)
    num_too_long, limit = len(rows) - len(kept), f"data.max_prompt_tokens={data.max_prompt_tokens}"
    if num_too_long and data.overlong_prompts is OverlongPrompts.refuse:
        raise ValueError(f"data.overlong_prompts=refuse: {num_too_long} of {len(rows)} {name} prompts exceed {limit}")
    screen.message(f"{name}: {len(kept)} prompts, {num_too_long} left out ({limit})")
    if not kept:
        raise ValueError(f"no {name} prompt has at most {limit} tokens")
    return kept


def _load(config: Config, entries: str) -> list[Row]:
    data = config.data
    return rows.load_rows(entries, rows.Columns(prompt=data.prompt_key, answer=data.answer_key), data.loader)


def _as_row(problem: Problem) -> Row:
    return Row(question=problem.question, ground_truth=rows.final_answer(problem.answer))
