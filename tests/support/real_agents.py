"""Programs of others as harnesses of a session: what they sent, what they were answered, and what is trained of it."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.data import DataConfig
from configs.named_agents import NamedAgent
from configs.rollout import SessionsConfig
from configs.schema import Config, RolloutConfig
from rollout.agents.loop import Episode
from rollout.sessions.harness import CommandEnd, CommandHarness, CommandPlace, start_here
from rollout.sessions.harness_loop import HarnessLoop
from scripts.plan.agent_report import Exchange
from scripts.plan.agent_trial import RecordingHost
from tests.support.chat_models import chat_tokenizer
from tests.support.harnesses import FAMILY, SAY, Policy, episode_task

QUESTION = "- What is 6 times 7?"
"""Begins as an option does."""
MAX_TOKENS = 400_000
"""The context: a coding agent's first request has tens of thousands of tokens."""
TIMEOUT_S = 120.0
SPOKEN = ("content", "text", "output", "instructions", "system", "description", "input")
"""Fields whose texts the policy must read."""
BILLING = "x-anthropic-billing-header:"


@dataclass(frozen=True)
class Outcome:
    policy: Policy
    episode: Episode
    exchanges: list[Exchange]
    output: str

    @property
    def refused(self) -> list[Exchange]:
        return [exchange for exchange in self.exchanges if exchange.is_refused]


def run_agent(agent: NamedAgent, say: SAY, folder: Path | None = None, place: CommandPlace = start_here) -> Outcome:
    """Run one episode of an agent on a session host, whose policy says its lines. Its folder begins as a copy of
    `folder`."""
    config = Config(
        data=DataConfig(max_prompt_tokens=MAX_TOKENS),
        rollout=RolloutConfig(max_response_tokens=MAX_TOKENS),
        sessions=SessionsConfig(
            timeout_s=TIMEOUT_S, kept_folders=0, folder_template=None if folder is None else str(folder)
        ),
    )
    policy, ends = Policy(say), list[CommandEnd]()
    host = RecordingHost.of(config, chat_tokenizer(FAMILY))

    async def main() -> Episode:
        loop = HarnessLoop(CommandHarness(agent, config.sessions, ends.append, place), host, config.sessions)
        try:
            return await loop.run_episode(episode_task(max_tokens=MAX_TOKENS, text=QUESTION), policy.generate)
        finally:
            await loop.close()

    episode = asyncio.run(main())
    output = b"".join(end.stdout + end.stderr for end in ends).decode(errors="replace")
    return Outcome(policy, episode, host.recorder.exchanges, output)


# -- bars --------------------------------------------------------------------------------------------------------------


def check_tokens(outcome: Outcome) -> None:
    """Every run of trained tokens is one sampled answer, once, after exactly the tokens it was sampled after."""
    left = dict(outcome.policy.sampled)
    for sequence in outcome.episode.sequences:
        ids, start = sequence.token_ids, len(sequence.prompt_ids)
        mask = np.concatenate([np.zeros(start, bool), sequence.loss_mask])
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            run, before = ids[begin:end].tolist(), tuple(ids[:begin].tolist())
            turns = [turn for turn, answer in left.items() if answer.token_ids.tolist() == run]
            turns = [turn for turn in turns if tuple(outcome.policy.prompts[turn]) == before]
            assert turns, f"{end - begin} trained tokens were not sampled so"
            del left[turns[0]]
    assert not left, f"sampled answers that nothing trains: {sorted(left)}"


def check_reading(outcome: Outcome) -> None:
    """Every text that the program sent to be answered is in a prompt that the policy read."""
    prompts = [outcome.policy.tokenizer.decode(list(ids)) for ids in outcome.policy.prompts.values()]
    for request in outcome.exchanges:
        if request.status != 200 or not request.path.endswith(("/completions", "/messages", "/responses")):
            continue
        texts = set(_texts(request.body))
        assert texts, request.body
        unread = min(([text for text in texts if not _is_in(text, prompt)] for prompt in prompts), key=len)
        assert not unread, f"{len(unread)} of {len(texts)} texts were not read, such as {unread[0][:500]!r}"


def _is_in(text: str, prompt: str) -> bool:
    return text in prompt or json.dumps(text, ensure_ascii=False)[1:-1] in prompt


def _texts(value: Any, is_spoken: bool = False, is_schema: bool = False) -> Iterator[str]:
    if isinstance(value, str):
        if is_spoken and value.strip() and not value.startswith(BILLING):
            yield value.strip()
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, is_spoken)
    elif isinstance(value, Mapping):
        if value.get("type") in ("reasoning", "thinking", "web_search", "image_generation", "tool_search", "image"):
            return
        for name, item in value.items():
            yield from _texts(item, name in SPOKEN)
