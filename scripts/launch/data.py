"""The rows of a run, from files or generated, and their prompts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from configs.checks.sections import BUILT_IN_AGENT_LOOPS
from configs.data import Generated, OverlongPrompts
from configs.mixture import sources_of
from configs.schema import Config
from configs.validate import ConfigError
from rollout.agents.encoding import PromptError
from rollout.agents.loop import is_harness
from rollout.agents.worker_group import AgentWorkerGroup
from rollout.curriculum.levels import ColumnError, levels_of
from rollout.data import rows
from rollout.data.sources import DataError
from rollout.environments.search.world import World
from rollout.mixture import joined
from rollout.prompts import Row
from rollout.types import Prompt
from scripts.launch.models import generated_problems, world_questions
from scripts.launch.sandboxes import refuse_tasks
from trainer.tracking.console import Console

Rows = tuple[list[Row], list[Row] | None]
"""The training rows and the held-out rows, where None holds nothing out."""
MAX_SHOWN = 300
"""The most characters that are shown of a prompt."""


def load_sources(config: Config) -> dict[str, Rows]:
    """Return the rows of each source by name, which is empty without data.sources. Raises DataError for data that
    cannot be read, and names its source."""
    every: dict[str, Rows] = {}
    for source in sources_of(config):
        with naming(source.name):
            every[source.name] = train, held_out = load_rows(source.config)
            refuse_tasks(source.config, [*train, *(held_out or ())])
    return every


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Put the name of a source of data.sources in front of the ConfigErrors of the block, DataErrors among them."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"data.sources.{source}: {error}" if source else str(error)) from error


async def encode_sources(
    config: Config, encoder: AgentWorkerGroup, name: str, rows: Mapping[str, list[Row]], console: Console
) -> list[Prompt]:
    """Encode the rows of every source as `encode_rows` does. Return the prompts of all, source by source."""
    if not config.data.sources:
        return await encode_rows(config, encoder, name, rows[""], console)
    encoded: list[tuple[str, list[Prompt]]] = []
    for source in sources_of(config):
        if source.name in rows:
            with naming(source.name):
                own = rows[source.name]
                prompts = await encode_rows(source.config, encoder, f"{source.name} {name}", own, console, source.name)
                encoded.append((source.name, prompts))
    return joined(encoded)


def load_rows(config: Config) -> tuple[list[Row], list[Row] | None]:
    """Return the rows (train, held-out), where None holds nothing out. Raises DataError for data that cannot be
    read."""
    data = config.data
    train = _rows(config, data.train_files, 0)
    _check_curriculum(config, train)
    if data.val_share is None:
        return train, held_out_rows(config) if data.holds_out else None
    try:
        train, held_out = rows.split(train, data.val_share)
    except ValueError as error:
        raise DataError(str(error)) from error
    return train, held_out[: data.num_val]


def _check_curriculum(config: Config, train: list[Row]) -> None:
    """Raise DataError, with file and line, for a row without the column of data.curriculum.key."""
    curriculum = config.data.curriculum
    if curriculum.key is None:
        return
    try:
        levels_of([row.extra for row in train], curriculum.key, needs_numbers=curriculum.order == "stages")
    except ColumnError as error:
        raise DataError(f"{train[error.place].place}: {error}; data.curriculum.key names the column") from error


def held_out_sources(config: Config) -> dict[str, list[Row]]:
    """Return the held-out rows of each source that holds some out. Raises DataError."""
    every: dict[str, list[Row]] = {}
    for source in sources_of(config):
        if source.config.data.holds_out or not source.name:
            with naming(source.name):
                every[source.name] = held_out_rows(source.config)
                refuse_tasks(source.config, every[source.name])
    return every


def held_out_rows(config: Config) -> list[Row]:
    """Return the held-out rows. Raises DataError for data that cannot be read."""
    if config.data.val_share is not None:
        return load_rows(config)[1] or []
    return _rows(config, config.data.val_files, 1)[: config.data.num_val]


async def encode_rows(
    config: Config, encoder: AgentWorkerGroup, name: str, rows: list[Row], console: Console, source: str = ""
) -> list[Prompt]:
    """Encode the rows of a source, and report how many prompts are too long, and, where the rows are a user's own, what
    data.prompt_template makes of the first. `config`: the source's own.

    Raises:
        DataError: a row cannot be made a prompt, a prompt is too long and may not be left out, or none is left.
    """
    data = config.data
    try:
        kept = await encoder.encode(rows, data.prompt_template, data.chat_template, data.max_prompt_tokens, source)
    except PromptError as error:
        raise DataError(str(error)) from error
    num_too_long, limit = len(rows) - len(kept), f"data.max_prompt_tokens={data.max_prompt_tokens}"
    if num_too_long and data.overlong_prompts is OverlongPrompts.refuse:
        raise DataError(f"data.overlong_prompts=refuse: {num_too_long} of {len(rows)} {name} prompts exceed {limit}")
    split = "" if data.val_share is None else f", split by data.val_share={data.val_share:g}"
    console.message(f"{name}: {len(kept)} prompts, {num_too_long} left out ({limit}){split}")
    if not kept:
        raise DataError(f"no {name} prompt has at most {limit} tokens")
    if data.train_files is not None:
        text = kept[0].text if len(kept[0].text) <= MAX_SHOWN else f"{kept[0].text[:MAX_SHOWN]}..."
        console.message(f"the first {name} prompt, as the model reads it: {text!r}")
    return kept


def _rows(config: Config, entries: str | None, part: int) -> list[Row]:
    """Return the rows of the files, or of one of the two parts of the generated problems."""
    data = config.data
    if entries is not None:
        # Where an agent makes its own requests, a row's tools are a column like any other.
        has_agent = is_harness(config) or config.rollout.agent_loop not in BUILT_IN_AGENT_LOOPS
        tools = "tools" if data.chat_template or not has_agent else None
        columns = rows.Columns(prompt=data.prompt_key, answer=data.answer_key, tools=tools)
        return rows.load_rows(entries, columns, data.loader, data.loader_args)
    if data.generated is Generated.search_world:
        return [  # each number of hops is a data source, which is evaluated by itself
            Row(question=question.text, ground_truth=question.answer, data_source=f"{question.hops}_hop")
            for question in world_questions(config, World())[part]
        ]
    problems = generated_problems(config)[part]
    return [Row(question=problem.question, ground_truth=rows.final_answer(problem.answer)) for problem in problems]
