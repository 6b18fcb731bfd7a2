"""What a dry run looks at besides the config: the rows of the data, and the agent loop that a user's own code makes."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from configs.checks.sections import BUILT_IN_AGENT_LOOPS, TRAIN_AND_VAL, missing_data
from configs.schema import Config, ModelKind
from configs.validate import ConfigError
from rollout.agents.loop import load_agent_loop
from rollout.agents.worker_group import load_tokenizer
from scripts.launch.data import held_out_rows, load_rows
from scripts.launch.models import untrained_tiny_model


def count_rows(config: Config, needed_files: Sequence[str]) -> tuple[int | None, int | None]:
    """(training, held-out) rows, each None where it is not needed or missing. Raises DataError for a malformed row."""
    if not needed_files or any(missing_data(config, needed_files)):
        return None, None
    if tuple(needed_files) == TRAIN_AND_VAL:
        train, held_out = load_rows(config)
        return len(train), len(held_out)
    return None, len(held_out_rows(config))


def check_agent_loop(config: Config) -> str | None:
    """Makes the agent loop as an agent worker does. Returns why that cannot be done here. Raises ConfigError for what
    is no agent loop."""
    if config.rollout.agent_loop in BUILT_IN_AGENT_LOOPS:
        return None
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = config.model.path or ""
            if config.model.kind is ModelKind.tiny:
                path = untrained_tiny_model(config, Path(folder) / "model")
            tokenizer = load_tokenizer(path, local_only=True)
        except (OSError, ValueError) as error:
            return f"rollout.agent_loop={config.rollout.agent_loop}: not made, for want of the tokenizer: {error}"
        try:
            load_agent_loop(config.rollout.agent_loop, tokenizer)
        except Exception as error:
            key = f"rollout.agent_loop={config.rollout.agent_loop}: "
            text = str(error) if str(error).startswith(key) else f"{key}{type(error).__name__}: {error}"
            raise ConfigError(text) from error
    return None
