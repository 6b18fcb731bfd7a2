"""Rows of Search-R1's data set, NQ and HotpotQA: the questions within its instruction, with every right answer."""

import contextlib
from typing import Any

from rollout.data.sources import DataError, Record
from rollout.rewards.base import number_text

REPOSITORY = "PeterJinGo/nq_hotpotqa_train"
"""The repository of the data set on the hub."""
FILES = {"train": "train.parquet", "test": "test.parquet"}
"""The files of the repository by split. Their columns differ, so that no data set of two splits can be made of them."""
COLUMNS = ("question", "golden_answers", "data_source", "reward_model", "reward_spec", "extra_info")
"""The columns that are read. Another one holds whole paragraphs."""
SYSTEM = "You are a helpful and harmless assistant."
INSTRUCTION = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query "
    "</search> and it will return the top searched results between <information> and </information>. You can search as "
    "many times as you want. If you find no further external knowledge needed, you can directly provide the answer "
    "inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. Question: "
    "{question}"
)
"""Search-R1's (arXiv 2503.09516, table 1), with the system message that verl and SkyRL put before it."""
_TAG = "searchR1_"
"""The prefix that verl and SkyRL give to the source of a row."""


def converted(record: Record, place: str) -> Record:
    """Return a row in verl's schema, with its bare question and right answers besides. `record`: as published, or as
    verl's and SkyRL's scripts write it. Raises DataError, which names `place` and what the row lacks."""
    question, answers = _question(record), _answers(record)
    if question is None or not answers:
        lacks = "a question" if question is None else "golden_answers, or reward_model.ground_truth.target"
        raise DataError(f"{place}: needs {lacks}; the row has {', '.join(sorted(record))}")
    return {
        "data_source": str(record.get("data_source") or "").removeprefix(_TAG),
        "question": question,
        "golden_answers": answers,
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": INSTRUCTION.replace("{question}", question)},
        ],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": answers[0]},
    }


def _question(record: Record) -> str | None:
    """Return the question as Search-R1 asks it, with a question mark."""
    for value in (record.get("question"), _reached(record, "extra_info", "question")):
        if isinstance(value, str) and value.strip():
            text = value.strip()
            return text if text.endswith("?") else f"{text}?"
    return None


def _answers(record: Record) -> list[str]:
    in_schema = (_reached(record, column, "ground_truth", "target") for column in ("reward_model", "reward_spec"))
    return next(filter(None, map(_texts, (record.get("golden_answers"), *in_schema))), [])


def _reached(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _texts(value: Any) -> list[str]:
    """Return the texts in a value that say something, and its numbers as texts."""
    texts: list[str] = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int | float) and not isinstance(item, bool):
            with contextlib.suppress(ValueError):  # NaN
                texts.append(number_text(item))
        elif isinstance(item, str) and item.strip():
            texts.append(item)
    return texts
