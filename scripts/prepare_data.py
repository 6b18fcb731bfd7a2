"""Turns public data sets into parquet files in verl's schema.

slipstream prepare-data gsm8k|dapo_math|aime_2024|search_r1|all [--source PATH] [--folder data]

data_source, prompt (a list of messages), ability, reward_model {style, ground_truth}, extra_info {split, index};
search_r1 has also the bare question, and golden_answers, of which ground_truth is the first.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from configs.data import DataSource, parse_source
from rollout.data import search_r1
from rollout.data.rows import Columns, as_row
from rollout.data.sources import DataError, Record, records

GSM8K_PROMPT = '{question} Let\'s think step by step and output the final answer after "####".'
MATH_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{question}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
"""The prompt of DAPO-Math-17k; given to AIME's problems too, so that the test asks as the training does."""
PROMPT_COLUMNS = ("prompt", "question", "problem", "Problem")
ANSWER_COLUMNS = ("label", "answer", "Answer", "solution")
"""The names of the columns in the published sets. The first that a set has is taken, before them verl's
reward_model."""


@dataclass(frozen=True, slots=True)
class DataSet:
    """A public data set of problems with one answer each, and how it is converted."""

    data_source: str
    prompt: str
    """Template for a bare question. A list of messages is taken as it is."""
    splits: dict[str, str]
    """Maps the file to write to its source on the hub."""
    style: str = "rule-lighteval/MATH_v2"
    """The name that verl has for how the answer is compared."""


DATA_SETS = {  # search_r1 has several answers to a question, and a conversion of its own
    "gsm8k": DataSet(
        "openai/gsm8k", GSM8K_PROMPT, {split: f"openai/gsm8k:main@{split}" for split in ("train", "test")}, "rule"
    ),
    "dapo_math": DataSet("math_dapo", MATH_PROMPT, {"train": "BytedTsinghua-SIA/DAPO-Math-17k@train"}),
    "aime_2024": DataSet("aime_2024", MATH_PROMPT, {"test": "Maxwell-Jia/AIME_2024@train"}),
}


ALL = (*DATA_SETS, "search_r1")


def prepare(name: str, source: str | None, folder: Path) -> Iterator[str]:
    """Write `folder`/`name`/`split`.parquet and yield a line about each. Raises DataError.

    Args:
        source: Replaces the hub: a local file or a data set by name, for a set of one split; or a folder that has
            `split`.parquet or `split`.jsonl for every split.
    """
    if name == "search_r1":
        yield from _prepare_search_r1(source, folder / name)
        return
    data_set = DATA_SETS[name]
    for split, on_hub in data_set.splits.items():
        origin = parse_source(on_hub) if source is None else _local(source, split, list(data_set.splits))
        rows, num_read, num_contradictory = prepared(origin, data_set, split)
        path = folder / name / f"{split}.parquet"
        _write(path, rows, origin)
        yield (
            f"{path}: {len(rows)} prompts of {num_read} rows of {origin}; {num_read - len(rows)} repeated, "
            f"{num_contradictory} of them with another answer than the first"
        )


def _prepare_search_r1(source: str | None, folder: Path) -> Iterator[str]:
    """Prepare Search-R1's data. No row is left out: questions that are asked twice may belong to different sets."""
    for split in search_r1.FILES:
        origin = _downloaded(split) if source is None else _local(source, split, list(search_r1.FILES))
        rows = [
            search_r1.converted(record, place) | {"extra_info": {"split": split, "index": index}}
            for index, (place, record) in enumerate(records(origin, search_r1.COLUMNS))
        ]
        path = folder / f"{split}.parquet"
        _write(path, rows, origin)
        sources = ", ".join(f"{count} {name}" for name, count in Counter(row["data_source"] for row in rows).items())
        yield f"{path}: {len(rows)} prompts of {origin} ({sources})"


def _downloaded(split: str) -> DataSource:
    """Return the published file of a split of search_r1, from the hub or its cache. Raises DataError."""
    from httpx import HTTPError
    from huggingface_hub import hf_hub_download

    name, file = search_r1.REPOSITORY, search_r1.FILES[split]
    try:
        return DataSource(hf_hub_download(name, file, repo_type="dataset"))
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        files = " and ".join(search_r1.FILES.values())
        raise DataError(
            f"{name}: {file} cannot be loaded from the hub: {type(error).__name__}: {error}\n"
            f"Its files are {files}, below https://huggingface.co/datasets/{name}/resolve/main/"
        ) from error


def _write(path: Path, rows: list[Record], origin: DataSource) -> None:
    """Write a file whole or not at all. Raises DataError where there is nothing to write."""
    import pyarrow  # takes a second to import
    import pyarrow.parquet

    if not rows:
        raise DataError(f"{origin}: no rows")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), aside)
    aside.replace(path)


def prepared(source: DataSource, data_set: DataSet, split: str) -> tuple[list[Record], int, int]:
    """Return the distinct prompts of `source` in order, in the schema, how many rows it has, and how many of them
    repeat a prompt with another answer. Raises DataError.

    DAPO-Math-17k has each prompt about 100 times.
    """
    distinct: dict[str, Record] = {}
    num_read, num_contradictory, columns = 0, 0, None
    for place, record in records(source):
        num_read += 1
        columns = columns or _columns(record, place)
        row = as_row(record, place, columns)
        is_bare = isinstance(record[columns.prompt], str)
        template = data_set.prompt if is_bare else "{question}"
        question = template.replace("{question}", row.question)
        as_converted = {
            "data_source": data_set.data_source,
            "prompt": row.messages(template),
            "ability": "math",
            "reward_model": {"style": data_set.style, "ground_truth": canonical(row.ground_truth)},
            "extra_info": {"split": split, "index": len(distinct)},
        }
        first = distinct.setdefault(question, as_converted)
        num_contradictory += first["reward_model"] != as_converted["reward_model"]
    return list(distinct.values()), num_read, num_contradictory


def canonical(answer: str) -> str:
    """Write integers without leading zeros: AIME's answers are "073" in some sets and 73 in others."""
    return str(int(answer)) if answer.lstrip("-").isascii() and answer.lstrip("-").isdigit() else answer


def _columns(record: Record, place: str) -> Columns:
    """Return the columns of the record that hold the prompt and the answer."""
    prompts = [name for name in PROMPT_COLUMNS if name in record]
    in_verl = record.get("reward_model")
    answers = ["reward_model.ground_truth"] if isinstance(in_verl, dict) and "ground_truth" in in_verl else []
    answers += [name for name in ANSWER_COLUMNS if name in record]
    if not prompts or not answers:
        raise DataError(
            f"{place}: needs a column of {', '.join(PROMPT_COLUMNS)} and one of reward_model.ground_truth, "
            f"{', '.join(ANSWER_COLUMNS)}; "
            f"the row has {', '.join(sorted(record))}"
        )
    return Columns(prompt=prompts[0], answer=answers[0])


def _local(source: str, split: str, splits: list[str]) -> DataSource:
    for suffix in (".parquet", ".jsonl"):
        file = Path(source).expanduser() / f"{split}{suffix}"
        if file.is_file():
            return DataSource(str(file))
    if len(splits) > 1:
        names = " and ".join(f"{name}.parquet or {name}.jsonl" for name in splits)
        raise DataError(f"--source {source}: must be a folder with {names}")
    return parse_source(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*ALL, "all"])
    parser.add_argument("--source", help="a local file or folder, or another hub name, instead of the published set")
    parser.add_argument("--folder", type=Path, default=Path("data"), help="where NAME/SPLIT.parquet go (default: data)")
    arguments = parser.parse_args()
    if arguments.name == "all" and arguments.source is not None:
        parser.error("--source needs the name of one data set")
    try:
        for name in ALL if arguments.name == "all" else [arguments.name]:
            for line in prepare(name, arguments.source, arguments.folder):
                sys.stdout.write(line + "\n")
    except DataError as error:
        hint = "\nWithout a network, fetch the data set elsewhere and name it: --source PATH"
        sys.exit(f"{error}{hint if arguments.source is None else ''}")


if __name__ == "__main__":
    main()
