"""One episode of an agent against the real gateway, with a model that follows a script: no engine, and no weights."""

import json
import resource
import shlex
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from configs.schema import Config
from rollout.agents.loop import Episode, EpisodeTask, GenerateGroup
from rollout.chat.messages import Role, ToolSpec
from rollout.request_ids import RequestId
from rollout.sessions.harness import CommandEnd, Connection
from rollout.sessions.harness_loop import HarnessLoop, SessionHost, load_harness
from rollout.sessions.session import Session
from rollout.sessions.tree.sequences import rows
from rollout.types import Completion, GenerationRequest, Prompt, SamplingParams, VersionSpan
from scripts.launch.sandboxes import command_place
from scripts.plan.agent_report import REFUSED, AgentReport, Exchange, Row

MAX_TOKENS = 2**20
"""The context, which no agent reaches: the trial is to find out how much it needs."""
CALLS = 2
"""The turns in which the model calls a tool. Three requests show whether an agent keeps its history as it was."""
SHELL_PARAMETERS = ("command", "cmd")
SHELL_COMMAND = "echo slipstream"
ENDING_TOOLS = ("final_answer", "final_result", "finish", "submit", "done")
"""Tools by which agents let the model say that it is done."""
LAST_WORDS = "Done."
LAST_LINES = 8


def say_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call of a tool as Hermes and Qwen write it, which is what sessions read by default."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The answers of the model, by the number of its own answers that it reads. The last one is repeated."""

    lines: tuple[str, ...] = ()
    """Texts; without any, the model calls a tool twice, if it is offered one, and says that it is done."""

    @classmethod
    def read(cls, path: Path) -> "Script":
        """Read a file with an answer in each line: a text, or a call such as {"name": "bash", "arguments": {...}}.
        Raises OSError, and ValueError for a line that is neither."""
        lines: list[str] = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.startswith("{"):
                lines.append(line)
                continue
            try:
                call = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number}: must be a text, or JSON: {error}") from error
            if set(call) != {"name", "arguments"} or not isinstance(call["arguments"], dict):
                raise ValueError(f'line {number}: must be a text, or {{"name": ..., "arguments": {{...}}}}')
            lines.append(say_call(call["name"], call["arguments"]))
        if not lines:
            raise ValueError("must have an answer in each line")
        return cls(lines=tuple(lines))

    def answer(self, number: int, tools: Sequence[ToolSpec]) -> str:
        if self.lines:
            return self.lines[min(number, len(self.lines) - 1)]
        if tools and number < CALLS:
            tool = next((tool for tool in tools if _runs_commands(tool)), tools[0])
        else:
            ending = (tool for tool in tools if tool.name in ENDING_TOOLS)
            if (tool := next(ending, None)) is None:
                return LAST_WORDS
        return say_call(tool.name, example(tool.parameters))


def _runs_commands(tool: ToolSpec) -> bool:
    return any(name in SHELL_PARAMETERS for name in tool.parameters.get("properties", {}))


def example(schema: Any, name: str = "") -> Any:
    """Return a value that a JSON schema allows, as far as types and required fields say: a command that only speaks,
    where a field is one.

    Example: example({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}) == {"n": 1}
    """
    schema = schema if isinstance(schema, Mapping) else {}
    for choices in ("enum", "anyOf", "oneOf"):
        if schema.get(choices):
            first = schema[choices][0]
            return first if choices == "enum" else example(first, name)
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    match kind:
        case "integer" | "number":
            return max(1, schema.get("minimum", 1))
        case "boolean":
            return False
        case "array":
            return shlex.split(SHELL_COMMAND) if name in SHELL_PARAMETERS else []
        case "object" | None if not name or "properties" in schema:
            inner = schema.get("properties", {})
            needed = [key for key in inner if key in schema.get("required", ()) or key in SHELL_PARAMETERS]
            return {key: example(inner[key], key) for key in needed}
        case "object":
            return {}
        case _:
            return SHELL_COMMAND if name in SHELL_PARAMETERS else "1 + 1"


class ScriptedReplica:
    """Answers in the place of a replica."""

    def __init__(self, tokenizer: Any, script: Script, host: "RecordingHost"):
        self._tokenizer, self._script, self._host = tokenizer, script, host

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: GenerationRequest) -> Completion:
        generation = self._host.opened.transcript.generation(request.request_id.turn)
        number = sum(message.role is Role.assistant for message in generation.conversation)
        text = self._script.answer(number, generation.tools)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        ids = [*ids, *request.sampling.stop_token_ids[:1]]
        is_cut = len(ids) > request.sampling.max_tokens
        ids = ids[: request.sampling.max_tokens]
        return Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
            spans=(VersionSpan(0, len(ids), 0),),
            finish_reason="length" if is_cut else "stop",
        )


@dataclass(slots=True)
class Recorder:
    """Notes the requests to an app, and how they were answered."""

    app: ASGIApp
    exchanges: list[Exchange] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_s, status = time.monotonic() - self.began, 0
        asked, answered = bytearray(), bytearray()

        async def received() -> Message:
            message = await receive()
            asked.extend(message.get("body", b""))
            return message

        async def sent(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if status >= REFUSED:
                answered.extend(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, received, sent)
        finally:
            exchange = Exchange(
                method=scope["method"],
                path=scope["path"],
                status=status,
                body=_as_json(asked),
                answer=_as_json(answered),
                began_s=began_s,
                ended_s=time.monotonic() - self.began,
            )
            self.exchanges.append(exchange)


def _as_json(body: bytes | bytearray) -> Any:
    with suppress(ValueError):
        return json.loads(body)
    return None


class RecordingHost(SessionHost):
    """Serves sessions, and keeps what was asked in them."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.recorder = Recorder(super().make_app())
        self._opened: Session | None = None

    @property
    def opened(self) -> Session:
        """The latest session."""
        assert self._opened is not None
        return self._opened

    def make_app(self) -> ASGIApp:
        return self.recorder

    @asynccontextmanager
    async def open(self, task: EpisodeTask, generate: GenerateGroup) -> AsyncIterator[tuple[Session, Connection]]:
        async with super().open(task, generate) as (session, connection):
            self._opened = session
            yield session, connection


async def try_agent(config: Config, tokenizer: Any, prompt: str, script: Script) -> AgentReport:
    """Run the agent of the config once on a prompt, in a folder of its own, and report what it did. Raises ValueError
    for an agent that cannot be loaded, and for a tokenizer without a chat template."""
    roomy = replace(
        config,
        data=replace(config.data, max_prompt_tokens=MAX_TOKENS),
        rollout=replace(config.rollout, max_response_tokens=MAX_TOKENS),
        sessions=replace(config.sessions, kept_folders=0, tool_parser=None, reasoning_parser=None),
    )
    ends: list[CommandEnd] = []
    host = RecordingHost.of(roomy, tokenizer)
    loop = HarnessLoop(load_harness(roomy, ends.append, command_place(roomy)), host, roomy.sessions)
    task = EpisodeTask(
        request_id=RequestId(ordinal=0),
        prompt=Prompt(ordinal=0, text=prompt, token_ids=(1,), ground_truth=""),
        index=0,
        sampling=SamplingParams(max_tokens=MAX_TOKENS),
    )
    began, cpu_before = time.monotonic(), _processor_s()
    host.recorder.began = began
    try:
        episode = await loop.run_episode(task, ScriptedReplica(tokenizer, script, host).generate)
        seconds = time.monotonic() - began
    finally:
        await loop.close()
    return _report(config, host, episode, ends[-1] if ends else None, seconds, _processor_s() - cpu_before)


def _processor_s() -> float:
    """Return the processor time of all processes that this one has started and waited for, with those below them."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _report(
    config: Config, host: RecordingHost, episode: Episode, end: CommandEnd | None, seconds: float, processor_s: float
) -> AgentReport:
    rollout, transcript = config.rollout, host.opened.transcript
    statistics = transcript.statistics()
    answered = [row for row in rows(transcript.generations) if row]
    output = b"" if end is None else end.stderr if end.code and end.stderr.strip() else end.stdout or end.stderr
    agent = f"agent={rollout.agent}" if rollout.agent else f"agent_command={rollout.agent_command}"
    return AgentReport(
        key=f"rollout.{agent}",
        exchanges=tuple(host.recorder.exchanges),
        left_out=tuple(sorted(host.opened.left_out)),
        own_sampling=tuple(dict.fromkeys(name for each in transcript.generations for name in each.sampling)),
        num_answers=len(transcript.generations),
        rows=tuple(
            Row(num_answers=len(row), prompt_tokens=len(row[0].prompt_ids), tokens=len(row[-1].token_ids))
            for row in answered
        ),
        forks={cause.name: count for cause, count in statistics.forks.items()},
        longest_prompt=max((len(generation.prompt_ids) for generation in transcript.generations), default=0),
        sampled_tokens=statistics.sampled_tokens,
        tokenizer=config.model.path or "the tiny model",
        limit=host.opened.budget.limit_reached,
        error=None if episode.result is None else episode.result.error,
        exit_code=None if end is None else end.code,
        last_lines=tuple(output.decode(errors="replace").strip().splitlines()[-LAST_LINES:]),
        seconds=seconds,
        processor_s=None if end is None else processor_s,
        sessions=config.sessions,
        group_timeout_s=rollout.group_timeout_s,
    )
