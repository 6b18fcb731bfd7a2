"""The report of `slipstream agent-check`: what an agent did in one episode, and the keys that suit it."""

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.rollout import SessionsConfig

SESSION_FOLDERS = 2
"""The folders of a path below which the routes of one session are: /sessions/NAME/v1/messages."""
DIALECTS = {
    "/v1/chat/completions": "OpenAI chat completions",
    "/v1/completions": "OpenAI completions",
    "/v1/responses": "OpenAI Responses",
    "/v1/messages": "Anthropic Messages",
}
CONVERSATION = frozenset({"messages", "input", "instructions", "system", "prompt", "tools"})
"""Fields of a request that are what the policy reads, and no parameters."""
MOST_CHARS = 60
"""The characters of a parameter's value that are shown."""
REFUSED = 400
CAUSES = {
    "template": "the chat template renders the history in another way than before",
    "retoken": "the same text has other tokens when it is tokenized as a whole",
    "edit": "the agent changed the history, or put words into the policy's mouth",
    "compaction": "the agent shortened the history",
    "retry": "the client sent a request again",
    "length": "the answer before it was cut off",
    "tools": "the agent offered other tools than before",
}
"""The causes of forks, for people."""
STEP = 1024
"""Limits of tokens are rounded up to a multiple of it."""
PROMPT_MARGIN = 1.25
"""The room for prompts of the data that are longer than the one that was tried."""
RESPONSE_MARGIN = 4
"""The room for a policy that takes more turns than the scripted model, and says more."""
LEAST_RESPONSE = 4096
TURN_MARGIN, TIME_MARGIN = 4, 4
"""The room for episodes that are longer than the one that was tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A request of the agent, and how it was answered."""

    method: str
    path: str
    status: int
    body: Any = None
    """The body of the request as JSON."""
    answer: Any = None
    """The body of the answer where the request was refused."""
    began_s: float = 0.0
    ended_s: float = 0.0
    """`began_s` and `ended_s`: seconds since the agent was started."""

    @property
    def endpoint(self) -> str:
        """The path without the session: "/v1/messages"."""
        folders = self.path.split("/")
        if self.path.startswith("/sessions/"):
            return "/" + "/".join(folders[SESSION_FOLDERS + 1 :])
        return self.path

    @property
    def is_refused(self) -> bool:
        return self.status >= REFUSED

    @property
    def refusal(self) -> str:
        """The reason that the agent was told. It begins with the field that is refused."""
        error = self.answer.get("error") if isinstance(self.answer, Mapping) else None
        message = error.get("message") if isinstance(error, Mapping) else error
        return str(message or "no reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence that would be trained."""

    num_answers: int
    prompt_tokens: int
    """The tokens before its first answer."""
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    """The episode of an agent, in figures and names."""

    key: str
    """The override that names the agent, such as rollout.agent=codex."""
    exchanges: tuple[Exchange, ...]
    left_out: tuple[str, ...]
    """The fields of its requests that were left out."""
    own_sampling: tuple[str, ...]
    """The parameters of sampling that it asked for."""
    num_answers: int
    rows: tuple[Row, ...]
    forks: Mapping[str, int] = field(default_factory=dict)
    """Rows that began because something differed, by the name of the cause."""
    longest_prompt: int
    sampled_tokens: int
    tokenizer: str
    """The model that counts tokens so."""
    limit: str | None
    """The limit that ended the episode."""
    error: str | None
    """The reason why the episode has failed."""
    exit_code: int | None
    """None where the agent is no command, or was ended."""
    last_lines: tuple[str, ...]
    seconds: float
    processor_s: float | None
    """The processor time of its processes; None where the agent is no command."""
    sessions: SessionsConfig
    """The limits under which the agent ran."""
    group_timeout_s: float
    """The limit of a group of such episodes, rollout.group_timeout_s."""

    @property
    def first_prompt(self) -> int:
        """The tokens of the longest prompt with which a row begins."""
        return max((row.prompt_tokens for row in self.rows), default=self.longest_prompt)

    @property
    def is_trainable(self) -> bool:
        """True if an episode like this one would be trained."""
        return self.error is None and bool(self.rows)

    @property
    def longest_gap_s(self) -> float:
        """The longest time without a request under way."""
        gaps, last_end = [0.0], 0.0
        for exchange in sorted(self.exchanges, key=lambda exchange: exchange.began_s):
            gaps.append(exchange.began_s - last_end)
            last_end = max(last_end, exchange.ended_s)
        return max(*gaps, self.seconds - last_end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of the config to set."""

    name: str
    value: str
    why: str

    @property
    def override(self) -> str:
        return shlex.quote(f"{self.name}={self.value}")


def keys_to_set(report: AgentReport) -> list[Key]:
    """Return the keys besides that of the agent which suit what was seen: lengths always, and other limits where an
    episode that takes a few times longer would reach them."""
    limits = report.sessions
    growth = max(report.sampled_tokens, *(row.tokens - row.prompt_tokens for row in report.rows), 0)
    keys = [
        Key(
            name="data.max_prompt_tokens",
            value=str(_round_up(report.first_prompt * PROMPT_MARGIN, STEP)),
            why=f"the longest prompt that begins a row has {report.first_prompt:,} tokens",
        ),
        Key(
            name="rollout.max_response_tokens",
            value=str(_round_up(max(LEAST_RESPONSE, growth * RESPONSE_MARGIN), STEP)),
            why=f"answers and results of tools: {growth:,} tokens with the scripted model, which says little",
        ),
    ]
    if report.num_answers * TURN_MARGIN > limits.max_turns and report.limit is None:
        turns = str(report.num_answers * TURN_MARGIN)
        keys.append(Key(name="sessions.max_turns", value=turns, why=f"it had {_count(report.num_answers, 'answer')}"))
    if (least_s := _round_up(report.seconds * TIME_MARGIN, 60)) > limits.timeout_s:
        keys.append(Key(name="sessions.timeout_s", value=str(least_s), why=f"it took {report.seconds:.0f} s"))
        if least_s >= report.group_timeout_s:
            why = "must be more than sessions.timeout_s"
            keys.append(Key(name="rollout.group_timeout_s", value=str(2 * least_s), why=why))
    if (least_s := _round_up(report.longest_gap_s * TIME_MARGIN, 60)) > limits.idle_timeout_s:
        why = f"it asked nothing for {report.longest_gap_s:.0f} s"
        keys.append(Key(name="sessions.idle_timeout_s", value=str(least_s), why=why))
    return keys


def report_text(report: AgentReport) -> str:
    """Return the report as lines for a console."""
    parts = {
        report.key: _ending(report),
        "what it asked for": _asked(report.exchanges),
        "refused": _refusals(report.exchanges),
        "left out": _left_out(report),
        "what would be trained": _trained(report),
        f"tokens, by the tokenizer of {report.tokenizer}": _tokens(report),
        "keys to set": _keys(report),
    }
    return "\n".join("".join([f"{head}\n", *(f"  {line}\n" for line in lines)]) for head, lines in parts.items())


def _ending(report: AgentReport) -> Iterator[str]:
    code = "" if report.exit_code is None else f" with exit code {report.exit_code}"
    processor = "" if report.processor_s is None else f" ({report.processor_s:.1f} s of processor time)"
    yield f"ended after {report.seconds:.1f} s{processor}{code}"
    if report.error is not None:
        yield f"the episode has failed: {report.error.splitlines()[0]}"
    if report.limit is not None:
        yield f"it did not end by itself: it reached {report.limit}"
    if report.last_lines:
        yield "the last lines that it wrote:"
        yield from (f"| {line}" for line in report.last_lines)


def _asked(exchanges: Sequence[Exchange]) -> Iterator[str]:
    if not exchanges:
        yield "nothing: is it told where the session is, by OPENAI_BASE_URL or ANTHROPIC_BASE_URL?"
    calls = Counter((exchange.method, exchange.endpoint) for exchange in exchanges)
    for (method, endpoint), count in calls.items():
        same = [exchange for exchange in exchanges if (exchange.method, exchange.endpoint) == (method, endpoint)]
        bodies = [exchange.body for exchange in same if isinstance(exchange.body, Mapping)]
        dialect = f" ({DIALECTS[endpoint]})" if endpoint in DIALECTS else ""
        streamed = sum(body.get("stream") is True for body in bodies)
        yield f"{method} {endpoint}{dialect}: {_times(count)}" + (f", {streamed} streamed" if streamed else "")
        if parameters := _parameters(bodies):
            yield f"  parameters: {', '.join(parameters)}"
        if tools := list(dict.fromkeys(name for body in bodies for name in _tool_names(body.get("tools")))):
            yield f"  {_count(len(tools), 'tool')}: {', '.join(tools)}"


def _parameters(bodies: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return each parameter with its values in the order in which they came."""
    values: dict[str, dict[str, None]] = {}
    for body in bodies:
        for name, value in body.items():
            if name not in CONVERSATION:
                values.setdefault(name, {})[_shown(value)] = None
    return [f"{name}={' or '.join(shown)}" for name, shown in values.items()]


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}..."


def _tool_names(tools: Any) -> Iterator[str]:
    """Yield the names of tools in any dialect. A tool of a provider has none, and goes by its type."""
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, Mapping):
            function = tool.get("function")
            inner = function if isinstance(function, Mapping) else tool
            yield str(inner.get("name") or tool.get("type"))


def _refusals(exchanges: Sequence[Exchange]) -> Iterator[str]:
    refused = Counter(
        (exchange.status, f"{exchange.method} {exchange.endpoint}", exchange.refusal)
        for exchange in exchanges
        if exchange.is_refused
    )
    for (status, call, why), count in refused.items():
        yield f"{status} {call}, {_times(count)}: {why}"
    if not refused:
        yield "nothing"


def _left_out(report: AgentReport) -> Iterator[str]:
    yield from (f"{name}, which the policy does not read" for name in report.left_out)
    yield from (f"{name}: answers are sampled as rollout.{name} says" for name in report.own_sampling)
    if not report.left_out and not report.own_sampling:
        yield "nothing"


def _trained(report: AgentReport) -> Iterator[str]:
    yield f"{_count(report.num_answers, 'answer')} in {_count(len(report.rows), 'row')}"
    for number, row in enumerate(report.rows, 1):
        yield (
            f"row {number}: a prompt of {row.prompt_tokens:,} tokens, then {_count(row.num_answers, 'answer')}, "
            f"{row.tokens:,} tokens in all"
        )
    for name, count in report.forks.items():
        if count:
            yield f"{count} of them began by {name}: {CAUSES[name]}"
    if not any(report.forks.values()):
        yield "no row began because something differed"
    if (num_apart := len(report.rows) - 1 - sum(report.forks.values())) > 0:
        yield (
            f"{_count(num_apart, 'row')} began otherwise: a conversation besides, such as a title's or a sub-agent's, "
            "or an answer that the agent left out and asked for again"
        )


def _tokens(report: AgentReport) -> Iterator[str]:
    yield f"the first prompt of a row: {report.first_prompt:,} at most"
    yield f"the longest prompt: {report.longest_prompt:,}"
    yield f"all answers together: {report.sampled_tokens:,}, by a script"


def _keys(report: AgentReport) -> Iterator[str]:
    yield shlex.quote(report.key)
    keys = keys_to_set(report)
    width = max(len(key.override) for key in keys)
    yield from (f"{key.override:<{width}}  # {key.why}" for key in keys)
    context = sum(int(key.value) for key in keys[:2])
    yield f"and a model that supports {context:,} tokens"


def _count(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _round_up(value: float, step: int) -> int:
    return max(step, -int(-value // step) * step)
