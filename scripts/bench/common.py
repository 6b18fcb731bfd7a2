"""The work of benchmarks: responses of forced lengths, rewards by the flip of a coin, whole trainings in processes of
their own; and the memory of a process."""

import asyncio
import json
import math
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from configs.runtime.environment import PYTHON_PATH, REPO_ROOT
from rollout.agents.loop import Episode, EpisodeTask, GenerateGroup, SingleTurn
from rollout.request_ids import RequestId
from rollout.types import Completion, GenerationRequest, IntArray, Prompt, SamplingParams, TokenSequence, VersionSpan

QUIET = ("plain_console=true", "wandb.mode=disabled")
LengthOf = Callable[[int, int], int]
"""(prompt ordinal, index in its group) -> response length in tokens."""
ToolSecondsOf = Callable[[int, int], float]
"""(prompt ordinal, index in its group) -> seconds of the episode's tool, 0 if it has none."""


def scripted(token_ids: IntArray) -> Completion:
    """Return the answer of a policy that follows a script, and is sure of every token."""
    size = len(token_ids)
    return Completion(
        token_ids=token_ids,
        logprobs=np.zeros(size, np.float32),
        spans=(VersionSpan(0, size, 0),),
        finish_reason="stop",
    )


TOOL_SAYS = replace(scripted(np.zeros(1, np.int32)), spans=())
"""The answer of a tool: one token, which the policy did not sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormalLengths:
    """Long-tailed lengths with a given mean; sigma=0 makes all equal. A length depends on its arguments alone."""

    mean: float
    """The mean in tokens, before the cap."""
    sigma: float
    """The standard deviation of the length's logarithm."""
    cap: int
    """The longest response in tokens."""
    seed: int = 0

    def __call__(self, ordinal: int, index: int) -> int:
        normal = np.random.default_rng([self.seed, ordinal, index]).standard_normal()
        length = self.mean * math.exp(self.sigma * normal - self.sigma**2 / 2)
        return min(self.cap, max(1, round(length)))


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformLengths:
    """Lengths from `low` to `high` tokens, both included."""

    low: int
    high: int
    seed: int = 0

    def __call__(self, ordinal: int, index: int) -> int:
        return int(np.random.default_rng([self.seed, ordinal, index]).integers(self.low, self.high + 1))


@dataclass(frozen=True, slots=True)
class ForcedLengths:
    """A single-turn agent loop that forces the length of every response, whatever the model samples."""

    length_of: Mapping[str, LengthOf]
    """`data_source` of the prompt -> lengths. Prompts of other sources are not forced."""

    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
        return await SingleTurn().run([self._forced(task) for task in tasks], generate)

    def _forced(self, task: EpisodeTask) -> EpisodeTask:
        if task.prompt.data_source not in self.length_of:  # held-out prompts
            return task
        length = self.length_of[task.prompt.data_source](task.prompt.ordinal, task.index)
        return replace(task, sampling=replace(task.sampling, max_tokens=length, ignore_eos=True, stop_token_ids=()))


@dataclass(frozen=True, slots=True)
class SlowTools:
    """An agent loop whose episodes each run by themselves: an answer of forced length, and for some of them a tool and
    another answer as long."""

    length_of: LengthOf
    tool_s: ToolSecondsOf

    async def run_episode(self, task: EpisodeTask, generate: GenerateGroup) -> Episode:
        which = task.prompt.ordinal, task.index
        length, tool_s = self.length_of(*which), self.tool_s(*which)
        parts = await generate([self._request(task, length, 0)])
        if tool_s:
            await asyncio.sleep(tool_s)
            parts += [TOOL_SAYS, *await generate([self._request(task, length, 1)])]
        response = Completion.concatenate(parts)
        is_sampled = np.zeros(response.num_tokens, np.bool_)
        for span in response.spans:
            is_sampled[span.start : span.end] = True
        sequence = TokenSequence.of(task.prompt.token_ids, response, is_sampled)
        return Episode(sequences=(sequence,), finish_reason="stop", cached_tokens=0)

    @staticmethod
    def _request(task: EpisodeTask, length: int, turn: int) -> GenerationRequest:
        return GenerationRequest(
            request_id=replace(task.request_id, turn=turn),
            prompt_ids=task.prompt.token_ids,
            sampling=replace(task.sampling, max_tokens=length, ignore_eos=True, stop_token_ids=()),
        )


def make_task(ordinal: int) -> EpisodeTask:
    """Return an episode that may be as long as it likes."""
    prompt = Prompt(ordinal=ordinal, text="How many?", token_ids=(1,), ground_truth="55")
    sampling = SamplingParams(max_tokens=2**20)
    return EpisodeTask(request_id=RequestId(ordinal=ordinal), prompt=prompt, index=0, sampling=sampling)


def coin_reward(prompt: Prompt, text: str) -> float:
    """Return 0 or 1 by a hash of the text: an untrained model earns nothing, and a group whose rewards are all equal
    is not trained on."""
    return float(zlib.crc32(text.encode()) % 2)


COIN_REWARD = f"{coin_reward.__module__}:{coin_reward.__name__}"
"""The value of rollout.reward."""


def run_logged(command: Sequence[str], log: Path, **environment: str) -> None:
    """Run the command in the repository root, with its output in `log`. Raises RuntimeError with the end of `log` when
    it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = os.environ | {"PYTHONPATH": PYTHON_PATH} | environment
    with log.open("w") as file:
        code = subprocess.run(command, cwd=REPO_ROOT, env=variables, stdout=file, stderr=file, check=False).returncode
    if code != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{log.read_text()[-3000:]}")


def train(run_dir: Path, overrides: Sequence[str]) -> Mapping[str, Any]:
    """Run scripts.train, with its output in RUN_DIR.log. Returns summary.json. Raises RuntimeError when it failed."""
    command = [sys.executable, "-m", "scripts.train", f"hydra.run.dir={run_dir}", *QUIET, *overrides]
    run_logged(command, run_dir.with_suffix(".log"))
    return json.loads((run_dir / "summary.json").read_text())


def cpu_seconds(*, own: bool = True) -> float:
    """Return the CPU seconds of the processes that this one has started, and its own."""
    process = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in [*process.children(recursive=True), *([process] if own else [])])


def peak_host_bytes() -> int:
    """Return the most host memory that this process has held."""
    # Not `ru_maxrss`, in which Linux counts what the process that started this one held, too.
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(kilobytes) * 1024
