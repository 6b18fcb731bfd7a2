"""Keys of the data, and what an entry of data.train_files and data.val_files names."""

import os.path
import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class OverlongPrompts(Enum):
    """The treatment of a prompt of more than `max_prompt_tokens`."""

    filter = "filter"
    """It is left out, and counted."""
    refuse = "refuse"
    """The run does not start."""


class HiddenReasoning(Enum):
    """The treatment of an assistant's `reasoning` that the model's chat template does not show."""

    refuse = "refuse"
    """The run does not start."""
    drop = "drop"
    """The answer is learned without it, and counted."""


class Generated(Enum):
    """Problems that are made where no files are given. A tiny model is warmed up on their answers."""

    arithmetic = "arithmetic"
    """Problems of two steps with small numbers, which the model computes itself: a text that follows a text."""
    calculator = "calculator"
    """Problems of two to four steps with large numbers, for which the model calls a tool: a chat, so its tokenizer
    has a template."""
    search_world = "search_world"
    """Questions about a made-up world, which are answered by one or two searches (rollout/environments/search)."""


ORDERS = ("uniform", "frontier", "stages", "retry")
"""The values of data.curriculum.order besides functions of the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumConfig:
    order: str = "uniform"
    """Order in which prompts are drawn: uniform (each once per epoch, shuffled), frontier (those whose rewards are
    expected to vary most), stages (from easy to hard by a column), retry (as uniform, and prompts that failed come
    back), or `package.module:function` of (rows, passes, random) that returns the number of the row to draw."""
    key: str | None = None
    """Column of train_files: for stages the difficulty, a number; for frontier one whose values tell what is hard,
    from which prompts that were never drawn are judged. A dot reaches into a column."""
    pass_reward: float = 0.5
    """The reward from which on a response passes. A prompt is judged by the share of its responses that pass."""
    half_life: float = 100
    """Steps after which what was seen of a prompt counts half, because the policy has changed since."""
    stage_pass_rate: float = 0.8
    """Share of the responses of a stage's last 64 groups from which on the next stage begins."""
    retry_after: int = 256
    """Number of other prompts that are drawn before a prompt that failed comes back, once per epoch."""


NO_FILES = "none"
"""The value of data.val_files with which a run has no held-out set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    train_files: str | None = None
    """JSON files (an object a line, or one list) or parquet files, folders of `save_to_disk` (a split by
    `folder@train`) and hub data sets (`openai/gsm8k:main@train`), separated by commas. null, with val_files: generated
    word problems."""
    val_files: str | None = None
    """The held-out set, in the form of train_files; none: there is no held-out set, and a run evaluates nothing."""
    val_share: float | None = None
    """In place of val_files: the share of the prompts of train_files that is held out, such as 0.05. Their contents
    decide which these are, so the same prompts are held out in every run, and none is trained on."""
    loader: str | None = None
    """`package.module:function` that takes the text of train_files or val_files and returns its rows as dicts."""
    loader_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of data.loader beside that text, and of data.demonstrations, by name: data.loader_args.data_seed=1."""
    harbor: str | None = None
    """A task in Harbor's format, a folder of such tasks, or a list of these; slipstream/tasks are three that come with
    the package. It stands for train_files, loader and chat_template here, and for rollout.agent_loop and
    rollout.reward. val_files may name other tasks; without it and val_share, nothing is held out."""
    demonstrations: str | None = None
    """A `package.module:function` of (num, seed) that returns that many pairs of a question and its answer, on which
    a model.kind=tiny is warmed up in place of data.generated. An episode of several turns goes on with what the model
    reads next and then says. Needs data.loader."""
    generated: Generated = Generated.arithmetic
    """Problems that are made without train_files, and that model.kind=tiny is warmed up on: arithmetic, calculator (a
    chat in which a tool is called), or search_world (questions about made-up articles, answered by searches)."""
    num_train: int = 4000
    """Number of problems to generate where train_files is not set."""
    num_val: int | None = None
    """Most held-out problems to evaluate; null takes all (generated: 256)."""
    prompt_key: str = "question"
    """Column of the question: text, or a list of messages that ends with the user's or a tool's. A dot reaches into a
    column."""
    answer_key: str = "answer"
    """Column of the reference answer, such as `reward_model.ground_truth`. GSM8K's answer follows `####`."""
    prompt_template: str = "Question: {question}\nAnswer: "
    """Text around the question (the user's last message), in which `{question}` is replaced."""
    chat_template: bool = False
    """Apply the tokenizer's chat template to the messages and the row's tools, or to the question as one message; false
    joins their texts."""
    max_prompt_tokens: int = 1024
    """Longest prompt. The engine's context is this plus rollout.max_response_tokens."""
    overlong_prompts: OverlongPrompts = OverlongPrompts.filter
    """Treatment of longer prompts: filter (leave them out, and count them) or refuse (the run does not start)."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    sources: dict[str, Any] = field(default_factory=dict)
    """Sources of prompts that one run trains together, by name. Each has a weight (its share of the trained groups,
    relative to the others'), a loss_coef (a factor of its loss weights) and, by section, the keys that differ from
    those of the run: {search: {weight: 2, rollout: {reward: dapo}}}. Empty: the sections describe the only source."""

    @property
    def holds_out(self) -> bool:
        return self.val_files != NO_FILES

    @property
    def held_out_part(self) -> str | None:
        """Describe the part of train_files that is held out."""
        return None if self.val_share is None else f"{self.val_share:g} of {self.train_files}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """Used by `make sft`, and by training runs with algorithm.ce_coef."""

    train_files: str | None = None
    """Conversations to learn, in the forms of data.train_files: rows with `messages`, and `tools` if there are any, as
    OpenAI's API has them, or as ShareGPT, TRL or Alpaca do. null: the right answers to generated problems
    (data.generated=arithmetic or calculator)."""
    val_files: str | None = None
    """Conversations whose loss is measured every trainer.eval_every steps. null: none, or with train_files=null those
    of held-out problems."""
    max_tokens: int | None = None
    """Longest conversation. Longer ones are treated as data.overlong_prompts says. null: data.max_prompt_tokens +
    rollout.max_response_tokens."""
    hidden_reasoning: HiddenReasoning = HiddenReasoning.refuse
    """Treatment of `reasoning` in a message that the model's chat template does not show: refuse (the run does not
    start) or drop (learn the answer without it, and count it)."""
    per_step: int = 16
    """Conversations that are learned beside the rollouts of each step, with algorithm.ce_coef. `make sft` itself
    takes trainer.prompts_per_step."""


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
        return Path(os.path.expanduser(self.name))

    # Not those of Path, which raise for what no file can be called, such as a name of 5,000 characters.
    @property
    def exists(self) -> bool:
        return os.path.exists(self.path)

    @property
    def is_folder(self) -> bool:
        return os.path.isdir(self.path)

    @property
    def is_file(self) -> bool:
        """False for a pipe, too, whose reader would wait for ever."""
        return os.path.isfile(self.path)

    @property
    def may_be_on_the_hub(self) -> bool:
        """The hub needs a split, and as in `datasets`, a local folder precedes a hub data set of the same name."""
        is_name = _HUB_NAME.fullmatch(self.name) is not None and self.path.suffix not in FILE_TYPES
        return is_name and self.split is not None and not self.exists

    def __str__(self) -> str:
        subset = f":{self.subset}" if self.subset else ""
        return f"{self.name}{subset}@{self.split}" if self.split else self.name


def parse_sources(entries: str) -> list[DataSource]:
    return [parse_source(entry.strip()) for entry in entries.split(",")]


def parse_source(entry: str) -> DataSource:
    """Parses `path`, `folder@split`, `org/name@split` or `org/name:subset@split`."""
    match = _WITH_SPLIT.fullmatch(entry)
    if match is None or DataSource(entry).exists:
        return DataSource(entry)
    return DataSource(match["name"], match["subset"], match["split"])
