"""Harnesses that are killed and clients that go away, while the policy answers them: what is left behind."""

import asyncio
import contextlib
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rollout.sessions.generation import State
from rollout.sessions.harness import CommandHarness
from rollout.sessions.harness_loop import HarnessLoop, make_host
from rollout.sessions.host import SessionHost
from rollout.types import Completion, GenerationRequest
from scripts.bench.common import show_table
from scripts.bench.sessions.wire import FIRST_MESSAGES, Wire, body
from scripts.bench.sessions.world import Answers, harness_loop, run_episode, settings, task
from scripts.bench.simulated_engine import SimulatedEngine

FAMILY = "qwen2.5"
AT_ONCE = 20
STEP_S = 0.1
"""Of the engine: an answer takes four seconds."""
TIMEOUT_S = 2.0
"""sessions.timeout_s of the harnesses that are ended at their deadline."""
DEADLINE_S = 120.0
MARK = "SLIPSTREAM_BENCH_ENDS"
"""In the environment of all that a benchmark's harnesses start."""
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


@dataclass(slots=True)
class Policy:
    """Answers on an engine, and notes which requests of which session there are."""

    answers: Answers
    engine: SimulatedEngine
    began: dict[int, asyncio.Event] = field(default_factory=dict)
    """By ordinal of the prompt: whether a request of it runs, or ran."""

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        for request in requests:
            self.began.setdefault(request.request_id.ordinal, asyncio.Event()).set()
        return [await self.answers.on(self.engine, request) for request in requests]

    async def is_under_way(self, ordinal: int) -> None:
        await self.began.setdefault(ordinal, asyncio.Event()).wait()


# -- kills -------------------------------------------------------------------------------------------------------------


async def bench_kills(num_kills: int) -> dict[str, float]:
    """Every second harness is ended at its deadline, the others while they are being answered, as their group is given
    up: while the policy answers, the clock of a harness stands still."""
    answers = Answers(FAMILY)
    policy = Policy(answers, answers.engine(STEP_S, AT_ONCE * 2))
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "harness.py"
        script.write_text(HARNESS)
        harness = CommandHarness(f"{MARK}={os.getpid()} {sys.executable} -S {shlex.quote(str(script))}")
        for start in range(0, num_kills, AT_ONCE):
            numbers = range(start, min(start + AT_ONCE, num_kills))
            async with asyncio.timeout(DEADLINE_S):
                seconds += await _killed(harness, policy, numbers)
    left = len(_of_this_benchmark())
    found = {"kills": num_kills, "processes_left": left, "requests_left": len(policy.engine.running)}
    return _shown("kills", found | {"worst": max(seconds)})


async def _killed(harness: CommandHarness, policy: Policy, ordinals: Sequence[int]) -> list[float]:
    """Run harnesses side by side to their ends. Returns how long each took to end, from when it had to."""

    async def given_up(loop: HarnessLoop, ordinal: int) -> float:
        running = asyncio.create_task(run_episode(loop, ordinal, policy.generate))
        await policy.is_under_way(ordinal)
        began = time.perf_counter()
        running.cancel()
        await asyncio.wait([running])
        return time.perf_counter() - began

    async def overdue(loop: HarnessLoop, ordinal: int) -> float:
        began = time.perf_counter()
        episode = await run_episode(loop, ordinal, policy.generate)
        if episode.finish_reason != "length":
            raise RuntimeError(f"harness {ordinal} was not ended at its deadline: {episode.result}")
        return time.perf_counter() - began - TIMEOUT_S

    tokenizer = policy.answers.tokenizer
    patient, strict = harness_loop(harness, tokenizer), harness_loop(harness, tokenizer, timeout_s=TIMEOUT_S)
    async with patient as waits, strict as ends:
        return await asyncio.gather(*(given_up(waits, each) if each % 2 else overdue(ends, each) for each in ordinals))


def _of_this_benchmark() -> list[psutil.Process]:
    """Living processes that a harness of this process has started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            if is_alive and process.environ().get(MARK) == str(os.getpid()):
                found.append(process)
    return found


# -- disconnects -------------------------------------------------------------------------------------------------------


async def bench_disconnects(num_disconnects: int) -> dict[str, float]:
    """Every second client reads a stream."""
    answers = Answers(FAMILY)
    policy = Policy(answers, answers.engine(STEP_S, AT_ONCE))
    host = make_host(settings(), answers.tokenizer)
    steps, unread = [0.0], 0
    try:
        for start in range(0, num_disconnects, AT_ONCE):
            numbers = range(start, min(start + AT_ONCE, num_disconnects))
            async with asyncio.timeout(DEADLINE_S):
                found = await asyncio.gather(*(_disconnected(host, policy, number) for number in numbers))
            steps += [each for each, _ in found]
            unread += sum(each for _, each in found)
    finally:
        await host.close()
    left = {"requests_left": len(policy.engine.running), "trained_tokens": unread, "worst": max(steps)}
    return _shown("disconnects", {"disconnects": num_disconnects, **left})


async def _disconnected(host: SessionHost, policy: Policy, number: int) -> tuple[float, int]:
    """One client that goes away in mid answer. Returns the steps of the engine until its request has ended, and how
    many tokens of it would be trained. Raises RuntimeError where the transcript has no record of it."""
    async with host.open(task(number), policy.generate) as (session, connection):
        wire = await Wire.open(connection.url, connection.key)
        wire.send(body(FIRST_MESSAGES, stream=number % 2 == 1))
        await policy.is_under_way(number)
        await asyncio.sleep(STEP_S * (1 + number % 3))
        wire.writer.close()
        began = time.perf_counter()
        while str(task(number).request_id) in policy.engine.running:
            await asyncio.sleep(STEP_S / 100)
        seconds = time.perf_counter() - began
        while session.is_waiting:
            await asyncio.sleep(0)
        states = [one.state for one in session.transcript.generations]
        if states != [State.cancelled]:
            raise RuntimeError(f"disconnect {number}: the transcript has {states}")
        return seconds / STEP_S, sum(int(one.loss_mask.sum()) for one in session.transcript.sequences())


def _shown(what: str, figures: dict[str, float]) -> dict[str, float]:
    show_table(what, ["", ""], [[name, f"{value:.3g}"] for name, value in figures.items()])
    return {name if name == what else f"{what}_{name}": float(value) for name, value in figures.items()}
