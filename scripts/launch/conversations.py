"""The conversations that a run learns, from files or generated, and their tokens."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from configs.data import Generated, OverlongPrompts
from configs.runtime.carried import as_raised, carries_errors
from configs.runtime.deadline import within
from configs.schema import Config, ModelKind
from configs.validate import ConfigError
from rollout.agents.solver import TOOLS
from rollout.agents.worker_group import load_tokenizer
from rollout.data import calculator
from rollout.data.arithmetic import Problem
from rollout.data.conversations import Conversation, as_conversation, load_conversations
from rollout.data.sources import DataError
from rollout.sessions.demonstrations import demonstrations
from rollout.types import TrajectoryGroup
from scripts.launch.models import chat_template, generated_problems, untrained_tiny_model

Both = tuple[list[Conversation], list[Conversation]]
"""To train on, and for the validation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The demonstrations of a run."""

    train: list[TrajectoryGroup]
    validation: list[TrajectoryGroup]
    num_too_long: int

    def sentence(self, config: Config) -> str:
        sequences = [one for group in self.train for one in group.trajectories[0].sequences]
        num_tokens = sum(len(sequence.token_ids) for sequence in sequences)
        num_learned = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
        return (
            f"{len(self.train):,} conversations to learn in {len(sequences):,} sequences of {num_tokens:,} tokens, "
            f"{num_learned:,} of them the assistant's; {len(self.validation):,} for the validation; "
            f"{self.num_too_long:,} left out ({_limit(config)[1]})"
        )


def load_all(config: Config) -> Both:
    """Raises DataError for data that cannot be read."""
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
        ConfigError: as `_encode` does.
    """
    async with within(config.rollout.start_timeout_s, "rollout.start_timeout_s", "encoding the conversations"):
        task: Any = ray.remote(num_cpus=1)(carries_errors(_encode))
        return await as_raised(task.remote(config, model_path, rows, keep_template), "the task that encodes")


def conversations_here(config: Config) -> Learned | str:
    """The same in this process, without a download; a text says why they cannot be encoded."""
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
    """What a dry run says of them."""
    learned = conversations_here(config)
    return learned if isinstance(learned, str) else learned.sentence(config)


def _encode(config: Config, model_path: str, rows: Both, keep_template: bool) -> Learned:
    """Raises DataError for a conversation that the template does not render, or that is too long and may not be;
    ConfigError for a model that has no chat template."""
    tokenizer = load_tokenizer(model_path)
    if tokenizer.chat_template is None and (template := chat_template(config)) is not None:
        tokenizer.chat_template = template
        if keep_template:
            tokenizer.save_pretrained(model_path)
    max_tokens, limit = _limit(config)
    try:
        found = [demonstrations(tokenizer, some, config.sessions.reasoning, max_tokens) for some in rows]
    except DataError:
        raise
    except ValueError as error:
        raise ConfigError(f"model.path={config.model.path}: {error}") from error
    num_too_long = sum(one.num_too_long for one in found)
    if num_too_long and config.data.overlong_prompts is OverlongPrompts.refuse:
        raise DataError(f"data.overlong_prompts=refuse: {num_too_long} conversations exceed {limit}")
    if not found[0].groups:
        raise DataError(f"sft.train_files={config.sft.train_files}: no conversation has at most {limit} tokens")
    return Learned(train=found[0].groups, validation=found[1].groups, num_too_long=num_too_long)


def _limit(config: Config) -> tuple[int, str]:
    """The longest conversation, in tokens, and what says so."""
    if config.sft.max_tokens is not None:
        return config.sft.max_tokens, f"sft.max_tokens={config.sft.max_tokens}"
    limit = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return limit, f"data.max_prompt_tokens + rollout.max_response_tokens = {limit}"


def _generated(config: Config, problems: Sequence[Problem]) -> list[Conversation]:
    """Right answers, with a calculator if the problems are made for one."""
    with_tools = config.data.generated is Generated.calculator
    records: list[dict[str, Any]] = []
    for problem in problems:
        if with_tools:
            records.append({"messages": calculator.conversation(problem.question, problem.answer), "tools": TOOLS})
        else:
            said = [("user", problem.question), ("assistant", problem.answer)]
            records.append({"messages": [{"role": role, "content": content} for role, content in said]})
    name = config.data.generated.value
    return [as_conversation(record, f"{name} problem {number}") for number, record in enumerate(records, 1)]
