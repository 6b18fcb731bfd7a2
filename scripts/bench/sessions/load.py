"""Many sessions at once over HTTP: CPU per call, gaps of the event loop, and what the gateway adds to a call."""

import asyncio
import gc
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from configs.runtime.collector import collect_rarely
from rollout.agents.loop import Episode
from rollout.sessions.harness import Connection, HarnessTask
from rollout.sessions.harness_loop import HarnessLoop
from rollout.types import Completion, GenerationRequest
from scripts.bench.common import show_table
from scripts.bench.sessions.world import Answers, harness_loop, task
from scripts.bench.simulated_engine import SimulatedEngine

FAMILY = "qwen3"
STEP_S = 0.05
"""Of the engine, so that a call takes seconds, as with a model."""
TOOL_S = 1.0
TICK_S = 0.001
CALLS_PER_WINDOW = 32
GROUP_SIZE = 8
DISPATCH_S = 0.02
DEADLINE_S = 600.0


@dataclass(slots=True)
class Gaps:
    """How long the event loop was away, tick by tick: by the clock, which also runs while another process has the core,
    and the CPU time that this process itself took meanwhile, all threads together and that of the loop alone."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    loop_cpu: list[float] = field(default_factory=list)
    collections: list[float] = field(default_factory=list)
    """CPU seconds of every garbage collection."""

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        began = 0.0

        def on_collection(phase: str, _: object) -> None:
            nonlocal began
            if phase == "start":
                began = time.process_time()
            else:
                self.collections.append(time.process_time() - began)

        ticking = asyncio.create_task(self._tick())
        gc.callbacks.append(on_collection)
        try:
            yield
        finally:
            gc.callbacks.remove(on_collection)
            ticking.cancel()
            with suppress(asyncio.CancelledError):
                await ticking

    async def _tick(self) -> None:
        while True:
            wall, cpu, loop_cpu = time.perf_counter(), time.process_time(), time.thread_time()
            await asyncio.sleep(TICK_S)
            self.wall.append(time.perf_counter() - wall - TICK_S)
            self.cpu.append(time.process_time() - cpu)
            self.loop_cpu.append(time.thread_time() - loop_cpu)


class Clients:
    """A harness whose program runs in another process, with those of all other episodes."""

    _process: Process

    def __init__(self) -> None:
        self._ended: dict[int, asyncio.Future[None]] = {}
        self.seconds: dict[int, list[float]] = {}
        """By session: of each call, as its client saw it."""

    @asynccontextmanager
    async def started(self, turns: int) -> AsyncIterator[None]:
        command = (sys.executable, "-m", "scripts.bench.sessions.clients", str(turns), str(TOOL_S))
        self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=2**20)
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
        """Raises RuntimeError when the process ends."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            found = json.loads(line)
            self.seconds[found["number"]] = found["seconds"]
            self._ended[found["number"]].set_result(None)
        raise RuntimeError("the clients have ended: what they wrote to stderr says why")


class Meter:
    """Generates on an engine; notes how long each call was there, and the CPU time at the end of each window."""

    def __init__(self, answers: Answers, engine: SimulatedEngine):
        self._answers, self._engine = answers, engine
        self.tokenizer = answers.tokenizer
        self.seconds: dict[tuple[int, int], float] = {}
        """By session and turn."""
        self.cpu = [time.process_time()]

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        (request,) = requests
        began = time.perf_counter()
        completion = await self._answers.on(self._engine, request)
        self.seconds[request.request_id.ordinal, request.request_id.turn] = time.perf_counter() - began
        if len(self.seconds) % CALLS_PER_WINDOW == 0:
            self.cpu.append(time.process_time())
        return [completion]

    def cpu_per_call(self) -> list[float]:
        """Of every window, in seconds."""
        return [(after - before) / CALLS_PER_WINDOW for before, after in zip(self.cpu, self.cpu[1:], strict=False)]


async def bench_load(num_sessions: int, turns: int) -> dict[str, float]:
    """Twice: the ticks that find gaps take CPU themselves."""
    answers = Answers(FAMILY)
    thresholds = gc.get_threshold()
    collect_rarely()  # as agent workers do
    meter, clients, gaps = Meter(answers, answers.engine(STEP_S, num_sessions)), Clients(), Gaps()
    episodes = await _serve(meter, clients, num_sessions, turns)
    ticking = Meter(answers, answers.engine(STEP_S, num_sessions))
    async with gaps.watched():
        episodes += await _serve(ticking, Clients(), num_sessions, turns)
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    return _figures(meter, clients, gaps, episodes, await _engine_alone(answers, num_sessions))


async def _serve(meter: Meter, clients: Clients, num_sessions: int, turns: int) -> list[Episode]:
    async with asyncio.timeout(DEADLINE_S), clients.started(turns), harness_loop(clients, meter.tokenizer) as loop:
        running = asyncio.create_task(_run(loop, num_sessions, meter))
        reading = asyncio.create_task(clients.read())
        try:
            await asyncio.wait((running, reading), return_when=asyncio.FIRST_COMPLETED)
            return running.result() if running.done() else reading.result()
        finally:
            running.cancel()
            reading.cancel()
            await asyncio.wait((running, reading))


async def _run(loop: HarnessLoop, num_sessions: int, meter: Meter) -> list[Episode]:
    """In groups, one after another, as an agent worker gets them."""
    episodes: list[asyncio.Task[Episode]] = []
    for start in range(0, num_sessions, GROUP_SIZE):
        for number in range(start, min(start + GROUP_SIZE, num_sessions)):
            episodes.append(asyncio.create_task(loop.run_episode(task(number), meter.generate)))
        await asyncio.sleep(DISPATCH_S)
    return [await episode for episode in episodes]


async def _engine_alone(answers: Answers, num_sessions: int) -> float:
    """CPU seconds per call of the engine and nothing else."""
    meter = Meter(answers, answers.engine(STEP_S, num_sessions))
    began = time.process_time()
    prompt = GenerationRequest(request_id=task(0).request_id, prompt_ids=(1,), sampling=task(0).sampling)
    requests = [replace_id(prompt, number) for number in range(num_sessions)]
    await asyncio.gather(*(meter.generate([request]) for request in requests))
    return (time.process_time() - began) / num_sessions


def replace_id(request: GenerationRequest, number: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=task(number).request_id, prompt_ids=request.prompt_ids, sampling=request.sampling
    )


def _figures(
    meter: Meter, clients: Clients, gaps: Gaps, episodes: Sequence[Episode], engine_alone: float
) -> dict[str, float]:
    cpu = 1000 * np.array(
        meter.cpu_per_call()[len(clients.seconds) // CALLS_PER_WINDOW :]
    )  # after the first of every session
    added = 1000 * np.array(
        [
            seconds - meter.seconds[number, turn]
            for number, calls in clients.seconds.items()
            for turn, seconds in enumerate(calls)
        ]
    )
    wall, own = 1000 * np.array(gaps.wall), 1000 * np.array(gaps.cpu)
    figures = {
        "calls": float(len(added)),
        "cpu_ms_mean": 1000 * (meter.cpu[-1] - meter.cpu[0]) / len(added),
        "cpu_ms_p50": float(np.percentile(cpu, 50)),
        "cpu_ms_p99": float(np.percentile(cpu, 99)),
        "engine_cpu_ms": 1000 * engine_alone,
        "added_ms_p50": float(np.percentile(added, 50)),
        "added_ms_p99": float(np.percentile(added, 99)),
        "stall_ms_worst": float(wall.max()),
        "stall_ms_p999": float(np.percentile(wall, 99.9)),
        "stall_cpu_ms_worst": float(own.max()),
        "collection_ms_worst": 1000 * max(gaps.collections, default=0.0),
        "load_rows": float(np.mean([len(episode.sequences) for episode in episodes])),
    }
    show_table(
        f"{len(clients.seconds)} sessions at once", ["", ""], [[name, f"{each:.3g}"] for name, each in figures.items()]
    )
    return figures
