"""Refuses a config with values that are out of range or contradict one another, before anything starts."""

from collections.abc import Sequence
from dataclasses import replace

from configs.checks import sections
from configs.checks.agents import agent_problems
from configs.checks.algorithm import algorithm_problems
from configs.checks.engine_args import engine_args_problems
from configs.checks.problem import impossible_names
from configs.checks.ranges import out_of_range
from configs.checks.sandbox import sandbox_problems
from configs.checks.secrets import secret_problems
from configs.checks.sections import CONVERSATIONS, TRAIN_AND_VAL, teacher_problems, tracking_problems
from configs.checks.vllm_transport import vllm_transport_problems
from configs.mixture import never_trained, source_problems, sources_of, unread_keys
from configs.schema import Config

OF_EVALUATIONS = ("evaluation.", "trainer.eval_every", "data.num_val")


class ConfigError(ValueError):
    """A config value that cannot work. The message names the key, the value and what is allowed."""


def check(config: Config, needed_files: Sequence[str] = TRAIN_AND_VAL, overrides: Sequence[str] = ()) -> None:
    """Raises ConfigError that lists every problem. With data.sources, the config of each source is checked.

    Args:
        needed_files: the keys of data.* whose files the command reads.
        overrides: the command line, whose keys must not be without effect where those of a recipe may be.
    """
    find_problems = _mixture_lines if config.data.sources else _lines
    if lines := find_problems(config, needed_files, overrides):
        raise ConfigError("\n".join(lines))


def _mixture_lines(config: Config, needed_files: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return a line for each problem. One that the run has by itself and all sources have is one of shared keys."""
    if tuple(needed_files) == CONVERSATIONS:
        return ["data.sources: `slipstream sft` learns the conversations of sft.train_files: leave it out"]
    if problems := (
        list(impossible_names(config))
        or list(secret_problems(config))
        or [*source_problems(config), *unread_keys(config, overrides)]
        or (tuple(needed_files) == TRAIN_AND_VAL and list(never_trained(config)))
    ):
        return [problem.line(config) for problem in problems]
    sources = sources_of(config)
    idle = {source.name for source in sources if not source.config.data.holds_out}
    if len(idle) < len(sources):  # then keys of evaluations have an effect
        overrides = [override for override in overrides if not override.lstrip("+").startswith(OF_EVALUATIONS)]
    only_evaluates = tuple(needed_files) == ("val_files",) and len(idle) < len(sources)
    by_source = {
        source.name: _lines(source.config, () if only_evaluates and source.name in idle else needed_files, overrides)
        for source in sources
    }
    of_run = _lines(replace(config, data=replace(config.data, sources={})), needed_files, overrides)
    shared = [line for line in of_run if all(line in lines for lines in by_source.values())]
    own = [f"data.sources.{name}: {line}" for name, lines in by_source.items() for line in lines if line not in shared]
    return shared + own


def _lines(config: Config, needed_files: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return a line for each problem of a config with one source."""
    problems = (
        list(impossible_names(config))
        or list(secret_problems(config))
        or [  # the other lines may show values
            *out_of_range(config),
            *sections.model_problems(config),
            *sections.lora_problems(config),
            *sections.data_problems(config, needed_files),
            *sections.curriculum_problems(config),
            *sections.sft_problems(config, needed_files),
            *sections.unread_sft_keys(config, needed_files, overrides),
            *([] if config.dry_run else sections.missing_data(config, needed_files)),
            *sections.ray_problems(config),
            *sections.serve_problems(config),
            *sections.rollout_problems(config),
            *agent_problems(config, needed_files),
            *sections.speculative_problems(config),
            *engine_args_problems(config, trains=tuple(needed_files) == TRAIN_AND_VAL),
            *sections.evaluation_problems(config),
            *sections.unread_evaluation_keys(config, needed_files, overrides),
            *algorithm_problems(config),
            *sandbox_problems(config),
            *teacher_problems(config),
            *sections.trainer_problems(config),
            *sections.weight_sync_problems(config),
            *vllm_transport_problems(config),
            *sections.sharing_problems(config),
            *tracking_problems(config, trains=tuple(needed_files) in (TRAIN_AND_VAL, sections.CONVERSATIONS)),
        ]
    )
    return [problem.line(config) for problem in problems]
