"""Keys of the data."""

from dataclasses import dataclass
from enum import Enum


class OverlongPrompts(Enum):
    """What happens to a prompt of more than `max_prompt_tokens`."""

    filter = "filter"
    """It is left out, and counted."""
    refuse = "refuse"
    """The run does not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    train_files: str | None = None
    """JSONL or parquet files, folders of `save_to_disk` (a split by `folder@train`) and hub data sets
    (`openai/gsm8k:main@train`), separated by commas. null, with val_files: arithmetic word problems made here."""
    val_files: str | None = None
    """The held-out set, as train_files."""
    loader: str | None = None
    """`package.module:function` of your own: takes the text of train_files or val_files, gives its rows as dicts."""
    num_train: int = 4000
    """Arithmetic only: how many training problems to make."""
    num_val: int | None = None
    """At most so many held-out problems are evaluated; null takes all (arithmetic: 256)."""
    prompt_key: str = "question"
    """Column with the question: text, or a list of messages whose last is the user's. A dot reaches into a column."""
    answer_key: str = "answer"
    """Column with the reference answer, such as `reward_model.ground_truth`; GSM8K's follows `####`."""
    prompt_template: str = "Question: {question}\nAnswer: "
    """Text that takes the place of the question; it contains `{question}`, which is replaced."""
    chat_template: bool = False
    """Wrap the messages, or the question as the user's, in the tokenizer's chat template; false joins their texts."""
    max_prompt_tokens: int = 1024
    """Longest prompt. The engine's context is this plus rollout.max_response_tokens."""
    overlong_prompts: OverlongPrompts = OverlongPrompts.filter
    """What happens to longer ones: filter (left out, and counted) or refuse."""
