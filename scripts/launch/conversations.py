"""The conversations that a run learns, from files or generated, and their tokens."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.data import Generated, OverlongPrompts
from configs.runtime.deadline import within
from configs.schema import Config, ModelKind
from configs.validate import ConfigError
from rollout.actors.carried import as_raised, carries_errors
from rollout.agents.worker_group import load_tokenizer
from rollout.data import calculator
from rollout.data.arithmetic import Problem
from rollout.data.conversations import Conversation, as_conversation, load_conversations
from rollout.data.demonstrations import demonstrations
from rollout.data.sources import DataError
from rollout.environments.solver import TOOLS
from rollout.types import TrajectoryGroup
from scripts.launch.models import chat_template, generated_problems, untrained_tiny_model
from scripts.launch.nodes import driver_task

Both = tuple[list[Conversation], list[Conversation]]
"""The conversations to train on, and those for the validation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The demonstrations of a run."""

    train: list[TrajectoryGroup]
    validation: list[TrajectoryGroup]
    num_too_long: int
    num_without_reasoning: int = 0
    num_trimmed: int = 0

    def sentence(self, config: Config) -> str:
        sequences = [sequence for group in self.train for sequence in group.trajectories[0].sequences]
        num_tokens = sum(len(sequence.token_ids) for sequence in sequences)
        num_learned = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
        return (
            f"{len(self.train):,} conversations to learn in {len(sequences):,} sequences of {num_tokens:,} tokens, "
            f"{num_learned:,} of them the assistant's; {len(self.validation):,} for the validation; "
            f"{self.num_too_long:,} left out ({_limit(config)[1]})"
            f"{self._changes()}"
        )

    def _changes(self) -> str:
        """Return a sentence on how training differs from the conversations in the files, or an empty text."""
        changes = {
            "without their reasoning, which the chat template does not show": self.num_without_reasoning,
            "without white space at their ends, which the chat template leaves out": self.num_trimmed,
        }
        return "".join(f"; {number:,} answers are learned {how}" for how, number in changes.items() if number)


def load_all(config: Config) -> Both:
    """Return the conversations of the config, from files or generated. Raises DataError for data that cannot be
    read."""
    sft = config.sft
    if sft.train_files is None:
        train, held_out = generated_problems(config)
        return _generated(config, train), _generated(config, held_out)
    validation = [] if sft.val_files is None else load_conversations(sft.val_files)
    return load_conversations(sft.train_files), validation


async def encode_conversations(config: Config, model_path: str, rows: Both, *, keep_template: bool = False) -> Learned:
    """Encode them in a Ray task, so that the driver needs no tokenizer.

    Args:
        keep_template: the chat template of a tiny model that has none becomes part of its tokenizer in `model_path`.

    Raises:
        DataError, ConfigError: as `_encode` does.
    """
    async with within(config.rollout.start_timeout_s, "rollout.start_timeout_s", "encoding the conversations"):
        task = driver_task(carries_errors(_encode), config)
        return await as_raised(task.remote(config, model_path, rows, keep_template), "the task that encodes")


def conversations_here(config: Config) -> Learned | str:
    """Encode the conversations in this process, without a download. A text says why they cannot be encoded."""
    rows = load_all(config)
    with tempfile.TemporaryDirectory() as folder:
        try:
            tiny = config.model.kind is ModelKind.tiny
            path = untrained_tiny_model(config, Path(folder) / "model") if tiny else config.model.path or ""
            load_tokenizer(path, local_only=True)
        except (OSError, ValueError) as error:
            why = " ".join(str(error).split())
            return f"{len(rows[0]):,}, not encoded, for want of the tokenizer: {why}"
        return _encode(config, path, rows, keep_template=False)


def conversations_sentence(config: Config) -> str:
    """Return the sentence of a dry run on the conversations."""
    learned = conversations_here(config)
    return learned if isinstance(learned, str) else learned.sentence(config)


def _encode(config: Config, model_path: str, rows: Both, keep_template: bool) -> Learned:
    """Encode the conversations with the tokenizer of `model_path`.

    Raises:
        DataError: the template does not render a conversation, or one is too long and may not be left out.
        ConfigError: the model has no chat template.
    """
    tokenizer = load_tokenizer(model_path)
    if tokenizer.chat_template is None and (template := chat_template(config)) is not None:
        tokenizer.chat_template = template
        if keep_template:
            tokenizer.save_pretrained(model_path)
    max_tokens, limit = _limit(config)
    try:
        train, validation = (
            demonstrations(tokenizer, part, config.sessions.reasoning, max_tokens, config.sft.hidden_reasoning)
            for part in rows
        )
    except DataError:
        raise
    except ValueError as error:
        raise ConfigError(f"model.path={config.model.path}: {error}") from error
    num_too_long = train.num_too_long + validation.num_too_long
    if num_too_long and config.data.overlong_prompts is OverlongPrompts.refuse:
        raise DataError(f"data.overlong_prompts=refuse: {num_too_long} conversations exceed {limit}")
    if not train.groups:
        raise DataError(f"sft.train_files={config.sft.train_files}: no conversation has at most {limit} tokens")
    return Learned(
        train=train.groups,
        validation=validation.groups,
        num_too_long=num_too_long,
        num_without_reasoning=train.num_without_reasoning + validation.num_without_reasoning,
        num_trimmed=train.num_trimmed + validation.num_trimmed,
    )


def _limit(config: Config) -> tuple[int, str]:
    """Return the most tokens of a conversation, and the key that says so."""
    if config.sft.max_tokens is not None:
        return config.sft.max_tokens, f"sft.max_tokens={config.sft.max_tokens}"
    limit = config.context_tokens
    return limit, f"data.max_prompt_tokens + rollout.max_response_tokens = {limit}"


def _generated(config: Config, problems: Sequence[Problem]) -> list[Conversation]:
    """Return right answers to the problems, with a calculator if they are made for one."""
    with_tools = config.data.generated is Generated.calculator
    records: list[dict[str, Any]] = []
    for problem in problems:
        if with_tools:
            records.append({"messages": calculator.conversation(problem.question, problem.answer), "tools": TOOLS})
        else:
            turns = [("user", problem.question), ("assistant", problem.answer)]
            records.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    name = config.data.generated.value
    return [as_conversation(record, f"{name} problem {number}") for number, record in enumerate(records, 1)]
