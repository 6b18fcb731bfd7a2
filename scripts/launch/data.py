"""The rows of a run, from files or generated, and their prompts."""

from configs.data import Generated, OverlongPrompts
from configs.schema import Config
from rollout.agents.worker_group import AgentWorkerGroup
from rollout.data import rows
from rollout.data.sources import DataError
from rollout.prompts import Row
from rollout.search.world import Question, World
from rollout.types import Prompt
from scripts.launch.models import generated_problems, world_questions
from trainer.tracking.console import Console


def load_rows(config: Config) -> tuple[list[Row], list[Row]]:
    """Returns (train, held-out). Raises DataError for data that cannot be read."""
    return _rows(config, config.data.train_files, 0), held_out_rows(config)


def held_out_rows(config: Config) -> list[Row]:
    """Raises DataError for data that cannot be read."""
    return _rows(config, config.data.val_files, 1)[: config.data.num_val]


async def encode_rows(
    config: Config, encoder: AgentWorkerGroup, name: str, rows: list[Row], console: Console
) -> list[Prompt]:
    """Reports how many prompts are too long. Raises DataError if one is and may not be, or if none is left."""
    data = config.data
    kept = await encoder.encode(rows, data.prompt_template, data.chat_template, data.max_prompt_tokens)
    num_too_long, limit = len(rows) - len(kept), f"data.max_prompt_tokens={data.max_prompt_tokens}"
    if num_too_long and data.overlong_prompts is OverlongPrompts.refuse:
        raise DataError(f"data.overlong_prompts=refuse: {num_too_long} of {len(rows)} {name} prompts exceed {limit}")
    console.message(f"{name}: {len(kept)} prompts, {num_too_long} left out ({limit})")
    if not kept:
        raise DataError(f"no {name} prompt has at most {limit} tokens")
    return kept


def _rows(config: Config, entries: str | None, part: int) -> list[Row]:
    """Those of the files, or of one of the two parts of the generated problems."""
    data = config.data
    if entries is not None:
        columns = rows.Columns(prompt=data.prompt_key, answer=data.answer_key)
        return rows.load_rows(entries, columns, data.loader, data.loader_args)
    if data.generated is Generated.search_world:
        return [_world_row(question) for question in world_questions(config, World())[part]]
    problems = generated_problems(config)[part]
    return [Row(question=one.question, ground_truth=rows.final_answer(one.answer)) for one in problems]


def _world_row(question: Question) -> Row:
    """Each number of hops is a data source, which is evaluated by itself."""
    return Row(question=question.text, ground_truth=question.answer, data_source=f"{question.hops}_hop")
