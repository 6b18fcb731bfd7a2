"""Every held-out prompt is asked once, spread over the replicas, greedily and with a deadline."""

import asyncio
from collections.abc import Sequence

import pytest

from rollout.agent_worker import EvaluationPart
from rollout.evaluation import Evaluator
from rollout.rewards.budget import FailureBudget, RewardFailuresError
from rollout.types import Prompt, SamplingParams
from tests.fakes import make_prompt, run_virtual


class FakeRunner:
    """Prompt `ordinal` is rewarded with its ordinal, has ten times as many tokens, and takes `seconds`. The rewards of
    the first `failing` prompts fail."""

    def __init__(self, seconds: float = 1.0, failing: int = 0):
        self.failing = failing
        self.asked: dict[str, list[int]] = {}
        self.sampling: set[SamplingParams] = set()
        self._seconds = seconds

    async def evaluate(self, prompts: Sequence[Prompt], replica: str, sampling: SamplingParams) -> EvaluationPart:
        ordinals = [prompt.ordinal for prompt in prompts]
        self.asked[replica] = ordinals
        self.sampling.add(sampling)
        await asyncio.sleep(self._seconds)
        return EvaluationPart(
            rewards=tuple(map(float, ordinals)),
            response_tokens=tuple(10 * ordinal for ordinal in ordinals),
            versions=frozenset({8} if replica == "a" else {8, 7}),
            errors=tuple(f"{replica} failed" for ordinal in ordinals if ordinal < self.failing),
        )


def make_evaluator(runner: FakeRunner, num_prompts: int) -> Evaluator:
    prompts = [make_prompt(ordinal) for ordinal in range(num_prompts)]
    return Evaluator(
        prompts=prompts,
        replicas=["a", "b", "c"],
        runner=runner,
        max_tokens=9,
        timeout_s=5,
        failures=FailureBudget(0.25, 8),
    )


def test_every_prompt_is_asked_once_and_the_means_are_over_prompts_not_replicas() -> None:
    runner = FakeRunner()
    evaluator = make_evaluator(runner, 5)
    evaluation = run_virtual(evaluator.evaluate())
    assert runner.asked == {"a": [0, 3], "b": [1, 4], "c": [2]}
    assert runner.sampling == {SamplingParams(temperature=0.0, max_tokens=9)}
    assert (evaluation.accuracy, evaluation.mean_response_tokens, evaluation.num_prompts) == (2, 20, 5)
    assert evaluation.versions == (7, 8)
    run_virtual(evaluator.evaluate())
    assert evaluator.num_requests == 10


def test_replicas_without_a_share_are_left_alone() -> None:
    runner = FakeRunner()
    assert run_virtual(make_evaluator(runner, 2).evaluate()).num_prompts == 2
    assert runner.asked == {"a": [0], "b": [1]}


def test_an_evaluation_past_its_deadline_names_the_key() -> None:
    with pytest.raises(TimeoutError, match=r"evaluation took longer than rollout\.group_timeout_s=5"):
        run_virtual(make_evaluator(FakeRunner(seconds=6), 2).evaluate())


def test_rewards_that_fail_count_under_the_budget() -> None:
    evaluator = make_evaluator(FakeRunner(failing=1), 3)
    run_virtual(evaluator.evaluate())
    run_virtual(evaluator.evaluate())
    with pytest.raises(RewardFailuresError, match=r"^3 rewards failed, .*max_failed_rewards=0.25 .* 8 .*: a failed$"):
        run_virtual(evaluator.evaluate())
