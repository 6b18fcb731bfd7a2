"""An evaluator over a fake runner."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from rollout.evaluation.evaluator import Evaluator, OnLost
from rollout.failures import FailureBudget
from rollout.router import ReplicaRouter
from rollout.types import EvaluatedPrompt, EvaluatedSample, Prompt, SamplingParams
from tests.support.fakes import make_prompt


class FakeEvaluationRunner:
    """Prompt `ordinal` has accuracy `ordinal` in its first sample, 0 in others, ten times as many tokens, and takes
    `seconds`. The rewards of the first `failing` prompts fail. A call to a replica raises the next of its `errors`."""

    def __init__(self, seconds: float = 1.0, failing: int = 0, errors: dict[str, list[Exception]] | None = None):
        self.failing = failing
        self.asked: list[tuple[str, list[int]]] = []
        self.attempts: list[int] = []
        self.sampling: set[SamplingParams] = set()
        self._seconds = seconds
        self._errors = errors or {}

    async def evaluate(
        self, prompts: Sequence[Prompt], replica: str, sampling: SamplingParams, num_samples: int, attempt: int
    ) -> list[EvaluatedPrompt]:
        self.asked.append((replica, [prompt.ordinal for prompt in prompts]))
        self.attempts.append(attempt)
        self.sampling.add(sampling)
        await asyncio.sleep(self._seconds)
        if self._errors.get(replica):
            raise self._errors[replica].pop(0)
        return [self._evaluated(prompt, replica, num_samples) for prompt in prompts]

    def _evaluated(self, prompt: Prompt, replica: str, num_samples: int) -> EvaluatedPrompt:
        samples = [
            EvaluatedSample(
                accuracy=float(prompt.ordinal if index == 0 else 0),
                answer=f"{prompt.ordinal}",
                num_tokens=10 * prompt.ordinal,
                versions=frozenset({8} if replica == "a" else {8, 7}),
                error=f"{replica} failed" if index == 0 and prompt.ordinal < self.failing else None,
            )
            for index in range(num_samples)
        ]
        return EvaluatedPrompt(
            ordinal=prompt.ordinal, data_source=prompt.data_source, samples=tuple(samples), source=prompt.source
        )


GREEDY = SamplingParams(temperature=0.0, max_tokens=9)


def make_evaluator(
    runner: FakeEvaluationRunner,
    num_prompts: int,
    router: ReplicaRouter | None = None,
    num_samples: int = 1,
    on_lost: OnLost | None = None,
    timeout_s: float = 5,
) -> Evaluator:
    prompts = [replace(make_prompt(ordinal), data_source="odd" * (ordinal % 2)) for ordinal in range(num_prompts)]
    return Evaluator(
        prompts=prompts,
        router=router or make_router(),
        ask=runner.evaluate,
        sampling=GREEDY,
        num_samples=num_samples,
        timeout_s=timeout_s,
        failures=FailureBudget(num_trajectories=8, max_failed_rewards=0.25),
        on_lost=on_lost or (router or make_router()).remove,
    )


def make_router() -> ReplicaRouter:
    return ReplicaRouter(["a", "b", "c"], max_inflight=8)
