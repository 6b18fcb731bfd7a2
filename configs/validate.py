"""Refuses a config with values that are out of range or contradict one another, before anything starts."""

from collections.abc import Sequence

from configs.checks import sections
from configs.checks.algorithm import algorithm_problems
from configs.checks.curriculum import curriculum_problems
from configs.checks.engine_args import engine_args_problems
from configs.checks.named_agents import named_agent_problems
from configs.checks.problem import impossible_names
from configs.checks.ranges import out_of_range
from configs.checks.sandbox import sandbox_problems
from configs.checks.secrets import secret_problems
from configs.checks.sections import TRAIN_AND_VAL, teacher_problems, tracking_problems
from configs.schema import Config


class ConfigError(ValueError):
    """A config value that cannot work. The message names the key, the value and what is allowed."""


def check(config: Config, needed_files: Sequence[str] = TRAIN_AND_VAL, overrides: Sequence[str] = ()) -> None:
    """Raises ConfigError that lists every problem.

    Args:
        needed_files: the keys of data.* whose files the command reads.
        overrides: the command line, whose keys must not be without effect where those of a recipe may be.
    """
    problems = (
        list(impossible_names(config))
        or list(secret_problems(config))
        or [  # the other lines may show values
            *out_of_range(config),
            *sections.model_problems(config),
            *sections.lora_problems(config),
            *sections.data_problems(config, needed_files),
            *curriculum_problems(config),
            *sections.sft_problems(config, needed_files),
            *sections.unread_sft_keys(config, needed_files, overrides),
            *([] if config.dry_run else sections.missing_data(config, needed_files)),
            *sections.ray_problems(config),
            *sections.serve_problems(config),
            *sections.rollout_problems(config),
            *named_agent_problems(config, needed_files),
            *sections.chat_template_problems(config, needed_files),
            *sections.speculative_problems(config),
            *engine_args_problems(config, trains=tuple(needed_files) == TRAIN_AND_VAL),
            *sections.evaluation_problems(config),
            *sections.unread_evaluation_keys(config, needed_files, overrides),
            *algorithm_problems(config),
            *sandbox_problems(config),
            *teacher_problems(config),
            *sections.trainer_problems(config),
            *sections.weight_sync_problems(config),
            *sections.sharing_problems(config),
            *tracking_problems(config, trains=tuple(needed_files) in (TRAIN_AND_VAL, sections.CONVERSATIONS)),
        ]
    )
    if problems:
        raise ConfigError("\n".join(problem.line(config) for problem in problems))
