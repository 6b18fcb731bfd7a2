"""The question: what does the gateway of sessions cost, and what do killed harnesses and clients that go away leave
behind? Four minutes on two cores.

python -m scripts.bench.sessions [--only PART ...] [--repeats 5]

- `turns`: sessions of 128 turns, each a call of a tool and its result, with the templates of Qwen2.5 and of Qwen3,
  which thinks; process CPU time of a turn, medians over sessions and the last four turns.
- `load`: 256 sessions of 8 turns at once over HTTP, half of them streamed; the clients are in another process, the
  simulated engine (50 ms a token) is in the server's. CPU is that of the server's process over windows of 32 calls,
  engine included.
- `kills`: 200 commands whose children have children, some of which ignore SIGTERM or have left the process group, ended
  at their deadline or with their group while a request is under way.
- `disconnects`: 200 clients that go away in the middle of an answer, streamed or not.

The last line is JSON:

    FAMILY_words_ms_N       turns: rendering, tokenization, hashes and verification at turn N
    FAMILY_tokens_ms_N      turns: of that what is between messages and tokens, verification included
    FAMILY_tokens_128_over_8, FAMILY_words_128_over_8, FAMILY_rows
    FAMILY_not_sampled      turns: tokens trained that were not sampled
    cpu_ms_mean, _p50, _p99 load: CPU per call; engine_cpu_ms of it is the engine's
    stall_ms_worst, ..._p999
                            load: how much later than asked for a sleep of 1 ms ends on the server's event loop
    stall_cpu_ms_worst      load: the most CPU time that the server's process took between two of these sleeps
    collection_ms_worst     load: the longest garbage collection
    kills_*, disconnects_*  processes and requests at the engine that were left; sampled tokens of answers without a
                            reader that would be trained; the most engine steps that a disconnected request took to end
"""

import asyncio
import gc
import json
import os
import shlex
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import numpy as np
import psutil

from configs.rollout import SessionsConfig
from configs.schema import Config, RolloutConfig
from rollout.actors.collector import collect_rarely
from rollout.actors.tasks import run_with_background
from rollout.engines.simulated import SimulatedEngine
from rollout.request_ids import RequestId
from rollout.sessions.budget import make_limits
from rollout.sessions.codec import make_codec
from rollout.sessions.dialects.openai import OpenAIChat
from rollout.sessions.harness import CommandHarness, Connection, Harness, HarnessTask
from rollout.sessions.harness_loop import HarnessLoop, SessionHost
from rollout.sessions.tree.generation import State
from rollout.sessions.tree.transcript import Transcript
from rollout.types import Completion, GenerationRequest
from scripts.bench.common import make_task, scripted
from scripts.bench.event_loop import Stalls
from scripts.bench.harness import Figures, make_parser, run_parts, show_figures
from scripts.bench.session_clients import FIRST_MESSAGES, TOOL, append_turn, ask, open_client
from trainer.tiny.chat_templates import QWEN, build_tokenizer

PARTS = ("turns", "load", "kills", "disconnects")


NUM_SESSIONS, NUM_TURNS = 256, 8
"""The sessions of load, at once."""
NUM_ENDS = 200


def main() -> None:
    options = make_parser(__doc__, repeats=5, parts=PARTS).parse_args()
    parts = {
        "turns": lambda: measure_all_turns(options.repeats),
        "load": lambda: measure_load(NUM_SESSIONS, NUM_TURNS),
        "kills": lambda: measure_kills(NUM_ENDS),
        "disconnects": lambda: measure_disconnects(NUM_ENDS),
    }
    run_parts(options, parts)


# -- a host, tasks, and a policy that says its lines -------------------------------------------------------------------

THOUGHT = "<think>\nThe next number is needed before I can say how many there are in all.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17 * 3 + 4"}}\n</tool_call>'


class Policy:
    """A policy that calls the tool in every turn, after some reasoning where the family thinks: at once, or on an
    engine that takes its time and samples tokens without a text."""

    def __init__(self, family: str, step_s: float = 0.0, max_num_seqs: int = 1):
        self.tokenizer = build_tokenizer(QWEN[family])
        text = (THOUGHT if family == "qwen3" else "") + CALL
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        self._token_ids = np.array([*ids, self.tokenizer.eos_token_id], np.int32)
        self.engine = SimulatedEngine(
            length_of=lambda request: len(self._token_ids), step_s=step_s, max_num_seqs=max_num_seqs
        )
        self._began: dict[int, asyncio.Event] = {}
        """The events that tell, by ordinal of the prompt, whether a request of it runs or ran."""

    async def at_once(self, requests: list[GenerationRequest]) -> list[Completion]:
        return [scripted(self._token_ids) for _ in requests]

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        (request,) = requests
        self._began.setdefault(request.request_id.ordinal, asyncio.Event()).set()
        completion = await self.engine.generate(request)
        return [replace(completion, token_ids=self._token_ids[: completion.num_tokens])]

    async def is_under_way(self, ordinal: int) -> None:
        await self._began.setdefault(ordinal, asyncio.Event()).wait()


def make_config(**sessions: Any) -> Config:
    """Return limits that nothing reaches, unless `sessions` says so."""
    return Config(
        rollout=RolloutConfig(max_response_tokens=2**20),
        sessions=replace(SessionsConfig(max_turns=2**20), **sessions),
    )


@asynccontextmanager
async def harness_loop(harness: Harness, tokenizer: Any, **sessions: Any) -> AsyncIterator[HarnessLoop]:
    """Open the agent loop of a run."""
    config = make_config(**sessions)
    host = SessionHost.of(config, tokenizer)
    try:
        yield HarnessLoop(harness, host, config.sessions)
    finally:
        await host.close()


# -- turns -------------------------------------------------------------------------------------------------------------

TURNS = 128
SHOWN = (8, 32, 128)
WINDOW = 4
"""The cost at a turn is the median of so many turns up to it."""


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


async def measure_all_turns(repeats: int) -> Figures:
    figures: dict[str, float] = {}
    for family in QWEN:
        figures |= {f"{family}_{name}": value for name, value in (await measure_turns(family, repeats)).items()}
    return figures


async def measure_turns(family: str, repeats: int) -> Figures:
    policy, config = Policy(family), make_config()
    words = make_codec(config.sessions, policy.tokenizer)
    timed = Timed(words.in_thread)
    words, limits = replace(words, in_thread=timed), make_limits(config)
    host = SessionHost(words, limits, "policy", config.serve, config.sessions.host)
    try:
        sessions = [await _session(host, policy, timed) for _ in range(repeats)]
    finally:
        await host.close()
    figures: dict[str, float] = {}
    for name in ("words", "tokens"):
        for turn in SHOWN:
            window = [each[name] for turns, _ in sessions for each in turns[turn - WINDOW : turn]]
            figures[f"{name}_ms_{turn}"] = 1000 * median(window)
        figures[f"{name}_128_over_8"] = figures[f"{name}_ms_128"] / figures[f"{name}_ms_8"]
    transcript = sessions[0][1]
    figures["rows"] = float(transcript.statistics().num_sequences)
    figures["not_sampled"] = float(_not_sampled(transcript))
    show_figures(f"{family}: CPU of a turn", figures)
    return figures


async def _session(host: SessionHost, policy: Policy, timed: Timed) -> tuple[list[Figures], Transcript]:
    """Return the seconds of each turn: `words` are attachment, bridge, verification and the parsing of the answer;
    `tokens` of these what is between messages and tokens."""
    dialect, messages, turns = OpenAIChat(), list(FIRST_MESSAGES), list[Figures]()
    async with host.open(make_task(0), policy.at_once) as (session, _):
        for _ in range(TURNS):
            body = json.dumps({"model": "policy", "messages": messages, "tools": [TOOL]})
            call = dialect.parse(json.loads(body), 0)
            began, before = time.process_time(), timed.seconds
            answers = await session.answer(call.request)
            turns.append({"words": time.process_time() - began, "tokens": timed.seconds - before})
            whole = json.loads(json.dumps(dialect.body(call, answers)))
            append_turn(messages, whole["choices"][0]["message"])
    return turns, session.transcript


def _not_sampled(transcript: Transcript) -> int:
    """Count the tokens under the loss mask that differ from those sampled in their order."""
    sampled = [token for each in transcript.generations for token in each.completion.token_ids.tolist()]
    trained = [token for each in transcript.sequences() for token in each.response_ids[each.loss_mask].tolist()]
    differing = sum(first != second for first, second in zip(sampled, trained, strict=False))
    return differing + abs(len(sampled) - len(trained))


# -- load --------------------------------------------------------------------------------------------------------------

LOAD_FAMILY = "qwen3"
TOKEN_S = 0.05
"""The engine's time for a token, so that a call takes seconds, as with a model."""
TOOL_S = 1.0
CALLS_PER_WINDOW = 32
GROUP_SIZE = 8
DISPATCH_S = 0.02
LOAD_DEADLINE_S = 600.0


class Clients:
    """A harness whose program runs in another process, with those of all other episodes."""

    _process: Process

    def __init__(self) -> None:
        self._ended: dict[int, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def started(self, turns: int) -> AsyncIterator[None]:
        command = (sys.executable, "-m", "scripts.bench.session_clients", str(turns), str(TOOL_S))
        self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def run(self, task: HarnessTask, connection: Connection) -> float:
        self._ended[task.ordinal] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        line = {"number": task.ordinal, "url": connection.url, "key": connection.key}
        self._process.stdin.write(f"{json.dumps(line)}\n".encode())
        await self._ended[task.ordinal]
        return 1.0

    async def read(self) -> NoReturn:
        """Read which sessions have ended. Raises RuntimeError when the clients' process ends."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self._ended[int(line)].set_result(None)
        raise RuntimeError("the clients have ended: what they wrote to stderr says why")


class Meter:
    """Generates on an engine, and notes the CPU time at the end of each window of calls."""

    def __init__(self, num_sessions: int):
        self.policy = Policy(LOAD_FAMILY, TOKEN_S, num_sessions)
        self.calls = 0
        self.cpu = [time.process_time()]

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        completions = await self.policy.generate(requests)
        self.calls += 1
        if self.calls % CALLS_PER_WINDOW == 0:
            self.cpu.append(time.process_time())
        return completions


async def measure_load(num_sessions: int, turns: int) -> Figures:
    thresholds = gc.get_threshold()
    collect_rarely()  # as agent workers do
    meter, stalls = Meter(num_sessions), Stalls()
    await _serve(meter, num_sessions, turns)
    async with stalls.watched():  # a second time, because the ticks that find stalls take CPU themselves
        await _serve(Meter(num_sessions), num_sessions, turns)
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    cpu_ms = 1000 * np.diff(meter.cpu) / CALLS_PER_WINDOW
    p50, p99 = np.percentile(cpu_ms[num_sessions // CALLS_PER_WINDOW :], [50, 99])  # after the first call of each
    figures = {
        "cpu_ms_mean": float(cpu_ms.mean()),
        "cpu_ms_p50": float(p50),
        "cpu_ms_p99": float(p99),
        "engine_cpu_ms": 1000 * await _engine_alone(num_sessions),
        **stalls.figures(),
        "stall_cpu_ms_worst": 1000 * max(stalls.cpu),
        "collection_ms_worst": 1000 * max(stalls.collections, default=0.0),
    }
    show_figures(f"{num_sessions} sessions at once", figures)
    return figures


async def _serve(meter: Meter, num_sessions: int, turns: int) -> None:
    clients = Clients()
    loop = harness_loop(clients, meter.policy.tokenizer)
    async with asyncio.timeout(LOAD_DEADLINE_S), clients.started(turns), loop as harness:
        await run_with_background(_run_sessions(harness, num_sessions, meter), background=[clients.read()])


async def _run_sessions(loop: HarnessLoop, num_sessions: int, meter: Meter) -> None:
    """Run sessions in groups, one after another, as an agent worker gets them."""
    async with asyncio.TaskGroup() as group:
        for number in range(num_sessions):
            group.create_task(loop.run_episode(make_task(number), meter.generate))
            if number % GROUP_SIZE == GROUP_SIZE - 1:
                await asyncio.sleep(DISPATCH_S)


async def _engine_alone(num_sessions: int) -> float:
    """Return the CPU seconds per call of the engine and nothing else."""
    meter, sampling = Meter(num_sessions), make_task(0).sampling
    requests = [
        GenerationRequest(request_id=RequestId(ordinal=number), prompt_ids=(1,), sampling=sampling)
        for number in range(num_sessions)
    ]
    began = time.process_time()
    await asyncio.gather(*(meter.generate([request]) for request in requests))
    return (time.process_time() - began) / num_sessions


# -- kills -------------------------------------------------------------------------------------------------------------

ENDS_FAMILY = "qwen2.5"
AT_ONCE = 20
STEP_S = 0.1
"""A step of the engine: an answer takes four seconds."""
TIMEOUT_S = 2.0
"""The sessions.timeout_s of the harnesses that are ended at their deadline."""
DEADLINE_S = 120.0
MARK = "SLIPSTREAM_BENCH_ENDS"
"""A variable in the environment of all that a benchmark's harnesses start."""
HARNESS = """
import http.client, json, os, subprocess, time
from urllib.parse import urlsplit

subprocess.Popen(["sh", "-c", "trap '' TERM INT HUP; (trap '' TERM; sleep 301; true) & sleep 302; true"])
subprocess.Popen(["sleep", "303"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(304)
    os._exit(0)
url, key = urlsplit(os.environ["OPENAI_BASE_URL"]), os.environ["OPENAI_API_KEY"]
messages = [{"role": "user", "content": "How many?"}]
text = json.dumps({"model": "m", "messages": messages, "stream": os.getpid() % 2 == 0})
connection = http.client.HTTPConnection(url.netloc)
connection.request("POST", url.path + "/chat/completions", text, {"authorization": "Bearer " + key})
connection.getresponse().read()
time.sleep(305)
"""


async def measure_kills(num_kills: int) -> Figures:
    """End every second harness at its deadline, the others while they are being answered, as their group is given up:
    while the policy answers, the clock of a harness stands still."""
    policy = Policy(ENDS_FAMILY, STEP_S, AT_ONCE * 2)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "harness.py"
        script.write_text(HARNESS)
        command = f"{MARK}={os.getpid()} {sys.executable} -S {shlex.quote(str(script))}"
        harness = CommandHarness(command, SessionsConfig(kept_folders=0))
        for start in range(0, num_kills, AT_ONCE):
            async with asyncio.timeout(DEADLINE_S):
                await _kill(harness, policy, range(start, min(start + AT_ONCE, num_kills)))
    figures = {
        "kills": float(num_kills),
        "kills_processes_left": float(len(_left_processes())),
        "kills_requests_left": float(len(policy.engine.running)),
    }
    show_figures("kills", figures)
    return figures


async def _kill(harness: CommandHarness, policy: Policy, ordinals: Sequence[int]) -> None:
    """Run harnesses side by side to their ends."""

    async def give_up(loop: HarnessLoop, ordinal: int) -> None:
        running = asyncio.create_task(loop.run_episode(make_task(ordinal), policy.generate))
        await policy.is_under_way(ordinal)
        running.cancel()
        await asyncio.wait([running])

    async def overrun(loop: HarnessLoop, ordinal: int) -> None:
        episode = await loop.run_episode(make_task(ordinal), policy.generate)
        if episode.finish_reason != "length":
            raise RuntimeError(f"harness {ordinal} was not ended at its deadline: {episode.result}")

    patient = harness_loop(harness, policy.tokenizer)
    strict = harness_loop(harness, policy.tokenizer, timeout_s=TIMEOUT_S)
    async with patient as waits, strict as ends:
        await asyncio.gather(*(give_up(waits, each) if each % 2 else overrun(ends, each) for each in ordinals))


def _left_processes() -> list[psutil.Process]:
    """Return the living processes that a harness of this process has started."""
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            if is_alive and process.environ().get(MARK) == str(os.getpid()):
                left.append(process)
    return left


# -- disconnects -------------------------------------------------------------------------------------------------------


async def measure_disconnects(num_disconnects: int) -> Figures:
    """Let clients go away, every second of which reads a stream."""
    policy = Policy(ENDS_FAMILY, STEP_S, AT_ONCE)
    host = SessionHost.of(make_config(), policy.tokenizer)
    ends: list[tuple[float, int]] = []
    try:
        for start in range(0, num_disconnects, AT_ONCE):
            numbers = range(start, min(start + AT_ONCE, num_disconnects))
            async with asyncio.timeout(DEADLINE_S):
                ends += await asyncio.gather(*(_disconnected(host, policy, number) for number in numbers))
    finally:
        await host.close()
    figures = {
        "disconnects": float(num_disconnects),
        "disconnects_requests_left": float(len(policy.engine.running)),
        "disconnects_trained_tokens": float(sum(tokens for _, tokens in ends)),
        "disconnects_worst": max((steps for steps, _ in ends), default=0.0),
    }
    show_figures("disconnects", figures)
    return figures


async def _disconnected(host: SessionHost, policy: Policy, number: int) -> tuple[float, int]:
    """Let one client go away in mid answer. Returns the steps of the engine until its request has ended, and how many
    tokens of it would be trained. Raises RuntimeError where the transcript has no record of it."""
    task = make_task(number)
    async with host.open(task, policy.generate) as (session, connection):
        async with open_client() as http:
            asking = asyncio.create_task(
                ask(http, connection.url, connection.key, FIRST_MESSAGES, is_stream=number % 2 == 1)
            )
            await policy.is_under_way(number)
            await asyncio.sleep(STEP_S * (1 + number % 3))
            asking.cancel()
            await asyncio.wait([asking])
        began = time.perf_counter()
        while str(task.request_id) in policy.engine.running:
            await asyncio.sleep(STEP_S / 100)
        seconds = time.perf_counter() - began
        while session.budget.is_waiting:
            await asyncio.sleep(0)
        states = [each.state for each in session.transcript.generations]
        if states != [State.cancelled]:
            raise RuntimeError(f"disconnect {number}: the transcript has {states}")
        return seconds / STEP_S, sum(int(each.loss_mask.sum()) for each in session.transcript.sequences())


if __name__ == "__main__":
    main()
