"""Keys of the data, and what an entry of data.train_files and data.val_files names."""

import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class OverlongPrompts(Enum):
    """What happens to a prompt of more than `max_prompt_tokens`."""

    filter = "filter"
    """It is left out, and counted."""
    refuse = "refuse"
    """The run does not start."""


class Generated(Enum):
    """Problems that are made where no files are given. A tiny model is warmed up on their answers."""

    arithmetic = "arithmetic"
    """Of two steps with small numbers, which the model computes itself: a text that follows a text."""
    calculator = "calculator"
    """Of two to four steps with large numbers, for which it calls a tool: a chat, so its tokenizer has a template."""
    search_world = "search_world"
    """Questions about a made-up world, which are answered by one or two searches: rollout.search.tags:agent_loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    train_files: str | None = None
    """JSONL or parquet files, folders of `save_to_disk` (a split by `folder@train`) and hub data sets
    (`openai/gsm8k:main@train`), separated by commas. null, with val_files: generated word problems."""
    val_files: str | None = None
    """The held-out set, in the form of train_files."""
    loader: str | None = None
    """`package.module:function` that takes the text of train_files or val_files and returns its rows as dicts."""
    loader_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of data.loader beside that text, and of data.demonstrations, by name: data.loader_args.data_seed=1."""
    demonstrations: str | None = None
    """With data.loader and model.kind=tiny: `package.module:function` of (num, seed) that returns so many pairs of a
    question and its answer, which the model is warmed up on in place of data.generated."""
    generated: Generated = Generated.arithmetic
    """Problems that are made without train_files, and that model.kind=tiny is warmed up on: arithmetic, calculator (a
    chat in which a tool is called), or search_world (questions about made-up articles, answered by searches)."""
    num_train: int = 4000
    """Without train_files: number of problems to generate."""
    num_val: int | None = None
    """Most held-out problems to evaluate; null takes all (generated: 256)."""
    prompt_key: str = "question"
    """Column of the question: text, or a list of messages that ends with the user's. A dot reaches into a column."""
    answer_key: str = "answer"
    """Column of the reference answer, such as `reward_model.ground_truth`. GSM8K's answer follows `####`."""
    prompt_template: str = "Question: {question}\nAnswer: "
    """Text of the prompt, in which `{question}` is replaced."""
    chat_template: bool = False
    """Apply the tokenizer's chat template to the messages, or to the question as one; false joins their texts."""
    max_prompt_tokens: int = 1024
    """Longest prompt. The engine's context is this plus rollout.max_response_tokens."""
    overlong_prompts: OverlongPrompts = OverlongPrompts.filter
    """What happens to longer prompts: filter (leave them out, and count them) or refuse (the run does not start)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """Used by `make sft`, and by training runs with algorithm.ce_coef."""

    train_files: str | None = None
    """Conversations to learn, in the forms of data.train_files: rows with `messages`, and `tools` if there are any, as
    OpenAI's API has them. null: the right answers to generated problems (data.generated=arithmetic or calculator)."""
    val_files: str | None = None
    """Conversations whose loss is measured every trainer.eval_every steps. null: none, or with train_files=null those
    of held-out problems."""
    max_tokens: int | None = None
    """Longest conversation. Longer ones are treated as data.overlong_prompts says. null: data.max_prompt_tokens +
    rollout.max_response_tokens."""
    per_step: int = 16
    """With algorithm.ce_coef: conversations beside the rollouts of each step. `make sft` itself takes
    trainer.prompts_per_step."""


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WITH_SPLIT = re.compile(r"(?P<name>.+?)(?::(?P<subset>[\w.-]+))?@(?P<split>\w+)")
FILE_TYPES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True, slots=True)
class DataSource:
    """A local file or folder, or a data set of the hub, such as DataSource("openai/gsm8k", "main", "train")."""

    name: str
    """A path, or a hub name."""
    subset: str | None = None
    """Configuration of a hub data set; None takes its only one."""
    split: str | None = None

    @property
    def path(self) -> Path:
        return Path(self.name).expanduser()

    @property
    def may_be_on_the_hub(self) -> bool:
        """The hub needs a split, and as in `datasets`, a local folder precedes a hub data set of the same name."""
        is_name = _HUB_NAME.fullmatch(self.name) is not None and self.path.suffix not in FILE_TYPES
        return is_name and self.split is not None and not self.path.exists()

    def __str__(self) -> str:
        subset = f":{self.subset}" if self.subset else ""
        return f"{self.name}{subset}@{self.split}" if self.split else self.name


def parse_sources(entries: str) -> list[DataSource]:
    return [parse_source(entry.strip()) for entry in entries.split(",")]


def parse_source(entry: str) -> DataSource:
    """Parses `path`, `folder@split`, `org/name@split` or `org/name:subset@split`."""
    match = _WITH_SPLIT.fullmatch(entry)
    if match is None or Path(entry).expanduser().exists():
        return DataSource(entry)
    return DataSource(match["name"], match["subset"], match["split"])
