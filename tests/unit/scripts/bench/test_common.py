"""The lengths of responses that the benchmarks share."""

import asyncio
import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from configs.runtime.environment import PYTHON_PATH
from rollout.agents.loop import EpisodeTask
from rollout.request_ids import RequestId
from rollout.types import EMPTY, Completion, GenerationRequest, SamplingParams
from scripts.bench.common import ForcedLengths, LogNormalLengths, UniformLengths, run_logged
from tests.support.fakes import make_prompt


def test_lengths_depend_on_their_arguments_alone() -> None:
    lengths = LogNormalLengths(mean=200, sigma=1.0, cap=2000)
    assert lengths(3, 1) == LogNormalLengths(mean=200, sigma=1.0, cap=2000)(3, 1)
    drawn = [lengths(ordinal, index) for ordinal in range(500) for index in range(8)]
    assert mean(drawn) == pytest.approx(200, rel=0.1)
    assert mean(math.log(length) for length in drawn) == pytest.approx(math.log(200) - 0.5, abs=0.1)
    assert max(drawn) <= 2000
    assert {LogNormalLengths(mean=48, sigma=0.0, cap=99)(ordinal, 0) for ordinal in range(20)} == {48}
    uniform = [UniformLengths(low=64, high=66)(ordinal, 0) for ordinal in range(100)]
    assert set(uniform) == {64, 65, 66}


def test_forced_lengths_reach_every_request() -> None:
    asked: list[GenerationRequest] = []

    async def generate(requests: list[GenerationRequest]) -> list[Completion]:
        asked.extend(requests)
        return [EMPTY for _ in requests]

    loop = ForcedLengths({"": lambda ordinal, index: 10 * ordinal + index})
    sampling = SamplingParams(max_tokens=9, stop_token_ids=(0,))
    tasks = [
        EpisodeTask(request_id=RequestId(ordinal=4, episode=i), prompt=make_prompt(4), index=i, sampling=sampling)
        for i in range(3)
    ]
    asyncio.run(loop.run(tasks, generate))
    assert [request.sampling.max_tokens for request in asked] == [40, 41, 42]
    asyncio.run(loop.run([replace(tasks[0], prompt=replace(make_prompt(4), data_source="held-out"))], generate))
    assert asked.pop().sampling == sampling
    assert all(request.sampling.ignore_eos and not request.sampling.stop_token_ids for request in asked)


def test_trainings_of_benchmarks_find_what_this_process_finds(tmp_path: Path) -> None:
    """On a machine without a network, packages lie in a folder on PYTHONPATH."""
    run_logged([sys.executable, "-c", "import os; print(os.environ['PYTHONPATH'])"], tmp_path / "log")
    assert (tmp_path / "log").read_text().strip() == PYTHON_PATH
