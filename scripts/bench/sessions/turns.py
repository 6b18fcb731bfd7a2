"""What a turn of a long session costs: its tokens, its place in the tree, and the reading of its body."""

import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from rollout.sessions.dialects.openai_chat import OpenAIChat
from rollout.sessions.harness_loop import make_limits, make_words
from rollout.sessions.host import SessionHost
from rollout.sessions.transcript import Transcript
from scripts.bench.common import show_table
from scripts.bench.sessions.wire import FIRST_MESSAGES, body, with_result
from scripts.bench.sessions.world import Answers, settings, task

TURNS = 128
SHOWN = (8, 32, 128)
WINDOW = 4
"""The cost at a turn is the median of so many turns up to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    words_ms: float
    """Attachment, bridge, verification and the parsing of the answer."""
    tokens_ms: float
    """Of these: between messages and tokens, in either direction."""
    body_ms: float
    """JSON to messages, and an answer to JSON."""
    prompt_tokens: int


class Timed:
    """Runs what makes tokens of messages, and messages of tokens, and counts the CPU of its thread."""

    def __init__(self, in_thread: Callable[..., Awaitable[Any]]):
        self.seconds = 0.0
        self._in_thread = in_thread

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self._in_thread(self._timed, function, *arguments)

    def _timed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        began = time.thread_time()
        try:
            return function(*arguments)
        finally:
            self.seconds += time.thread_time() - began


async def bench_turns(family: str, repeats: int) -> dict[str, float]:
    answers, config = Answers(family), settings()
    words = make_words(config.sessions, answers.tokenizer)
    timed = Timed(words.in_thread)
    words, limits = replace(words, in_thread=timed), make_limits(config)
    host = SessionHost(words, limits, "policy", config.serve, config.sessions.host)
    try:
        sessions = [await _session(host, answers, timed) for _ in range(repeats)]
    finally:
        await host.close()
    turns = [turns for turns, _ in sessions]
    words_ms, tokens_ms, body_ms = (
        {turn: _at(turns, turn, name) for turn in SHOWN} for name in ("words_ms", "tokens_ms", "body_ms")
    )
    rows = [
        [str(turn), str(turns[0][turn - 1].prompt_tokens)]
        + [f"{ms[turn]:.3f}" for ms in (tokens_ms, words_ms, body_ms)]
        for turn in SHOWN
    ]
    show_table(f"{family}: CPU of a turn", ["turn", "prompt tokens", "tokens ms", "words ms", "body ms"], rows)
    statistics = sessions[0][1].statistics()
    found = {f"words_ms_{turn}": words_ms[turn] for turn in SHOWN}
    found |= {f"tokens_ms_{turn}": tokens_ms[turn] for turn in SHOWN}
    found |= {
        "tokens_128_over_8": tokens_ms[128] / tokens_ms[8],
        "words_128_over_8": words_ms[128] / words_ms[8],
        "words_ms_worst": max(max(map(_words, some)) for some in turns),
    }
    found |= {"rows": float(statistics.num_sequences), "merged_fraction": statistics.merged_fraction}
    found["not_sampled"] = float(_not_sampled(sessions[0][1]))
    return {f"{family}_{name}": value for name, value in found.items()}


async def _session(host: SessionHost, answers: Answers, timed: Timed) -> tuple[list[Turn], Transcript]:
    dialect, messages, turns = OpenAIChat(), list(FIRST_MESSAGES), list[Turn]()
    async with host.open(task(0), answers.at_once) as (session, _):
        for _ in range(TURNS):
            text = body(messages)
            began = time.process_time()
            asked = dialect.parse(json.loads(text), 0)
            parsed, counted = time.process_time(), timed.seconds
            found = await session.answer(asked.request)
            answered = time.process_time()
            whole = json.loads(json.dumps(dialect.body(asked, found)))
            written = time.process_time()
            body_ms, words_ms = 1000 * (parsed - began + written - answered), 1000 * (answered - parsed)
            turns.append(
                Turn(
                    words_ms=words_ms,
                    tokens_ms=1000 * (timed.seconds - counted),
                    body_ms=body_ms,
                    prompt_tokens=len(found[0].prompt_ids),
                )
            )
            with_result(messages, whole["choices"][0]["message"])
    return turns, session.transcript


def _words(turn: Turn) -> float:
    return turn.words_ms


def _at(sessions: Sequence[Sequence[Turn]], turn: int, name: str) -> float:
    return median(getattr(one, name) for turns in sessions for one in turns[turn - WINDOW : turn])


def _not_sampled(transcript: Transcript) -> int:
    """Tokens under the loss mask that differ from those sampled in their order."""
    sampled = [token for one in transcript.generations for token in one.completion.token_ids.tolist()]
    trained = [token for one in transcript.sequences() for token in one.response_ids[one.loss_mask].tolist()]
    return sum(one != other for one, other in zip(sampled, trained, strict=False)) + abs(len(sampled) - len(trained))
