"""Plays episodes of agent loops with a policy that says its lines, over a real tokenizer and chat template."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rollout.agents.encoding import encode
from rollout.agents.loop import Episode, EpisodeTask
from rollout.agents.multi_turn import MultiTurn
from rollout.prompts import Row
from rollout.request_ids import RequestId
from rollout.types import SamplingParams
from tests.support.chat_models import chat_tokenizer
from tests.support.harnesses import FAMILY, Policy
from tests.support.sequences import only


def play(
    loop: MultiTurn,
    lines: Sequence[str],
    *,
    question: str = "Guess.",
    ground_truth: str = "",
    ordinal: int = 0,
    max_tokens: int = 500,
    **extra: Any,
) -> Episode:
    """`extra`: the other columns of the row. The chat template is applied if the loop has a chat."""
    saying = iter(lines)
    policy = Policy(lambda text, request: next(saying))
    row = Row(question=question, ground_truth=ground_truth, extra=extra)
    (prompt,) = encode(policy.tokenizer, [row], "{question}", loop.chat is not None, 999, loop.prompt_tools)
    task = EpisodeTask(
        request_id=RequestId(ordinal=ordinal),
        prompt=replace(prompt, ordinal=ordinal),
        index=0,
        sampling=SamplingParams(max_tokens=max_tokens),
    )
    return asyncio.run(loop.run_episode(task, policy.generate))


def heard(episode: Episode) -> str:
    """What the policy did not sample of its only response."""
    sequence = only(episode)
    return chat_tokenizer(FAMILY).decode(sequence.response_ids[~sequence.loss_mask])


def error_of(episode: Episode) -> str:
    """Why there is no reward. Raises AssertionError where there is one."""
    assert episode.result is not None and episode.result.error is not None
    return episode.result.error
