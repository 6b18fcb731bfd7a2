"""Every held-out prompt is asked, spread over the replicas, with a deadline; what the answers amount to."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rollout.agent_worker import EvaluationPart
from rollout.evaluation import Evaluator, OnLost
from rollout.rewards.budget import FailureBudget, RewardFailuresError
from rollout.router import ReplicaRouter
from rollout.sample_scores import EvaluatedSample
from rollout.types import Prompt, SamplingParams
from tests.fakes import make_prompt, run_virtual


class FakeRunner:
    """Prompt `ordinal` has accuracy `ordinal` in its first sample, 0 in others, ten times as many tokens, and takes
    `seconds`. The rewards of the first `failing` prompts fail."""

    def __init__(self, seconds: float = 1.0, failing: int = 0):
        self.failing = failing
        self.asked: dict[str, list[int]] = {}
        self.sampling: set[SamplingParams] = set()
        self._seconds = seconds

    async def evaluate(
        self, prompts: Sequence[Prompt], replica: str, sampling: SamplingParams, num_samples: int
    ) -> EvaluationPart:
        self.asked[replica] = [prompt.ordinal for prompt in prompts]
        self.sampling.add(sampling)
        await asyncio.sleep(self._seconds)
        return EvaluationPart(
            samples=tuple(
                tuple(
                    EvaluatedSample(
                        accuracy=float(prompt.ordinal if index == 0 else 0),
                        answer=f"{prompt.ordinal}",
                        num_tokens=10 * prompt.ordinal,
                    )
                    for index in range(num_samples)
                )
                for prompt in prompts
            ),
            versions=frozenset({8} if replica == "a" else {8, 7}),
            errors=tuple(f"{replica} failed" for prompt in prompts if prompt.ordinal < self.failing),
        )


GREEDY = SamplingParams(temperature=0.0, max_tokens=9)


def make_evaluator(
    runner: FakeRunner,
    num_prompts: int,
    router: ReplicaRouter | None = None,
    num_samples: int = 1,
    on_lost: OnLost | None = None,
    timeout_s: float = 5,
) -> Evaluator:
    prompts = [replace(make_prompt(ordinal), data_source="odd" * (ordinal % 2)) for ordinal in range(num_prompts)]
    return Evaluator(
        prompts=prompts,
        replicas=router or make_router(),
        runner=runner,
        sampling=GREEDY,
        num_samples=num_samples,
        timeout_s=timeout_s,
        failures=FailureBudget(0.25, 8),
        on_lost=on_lost or (router or make_router()).remove,
    )


def make_router() -> ReplicaRouter:
    return ReplicaRouter(["a", "b", "c"], max_inflight=8)


def test_every_prompt_is_asked_once_and_the_means_are_over_prompts_not_replicas() -> None:
    runner = FakeRunner()
    evaluator = make_evaluator(runner, 5)
    evaluation = run_virtual(evaluator.evaluate())
    assert runner.asked == {"a": [0, 3], "b": [1, 4], "c": [2]}
    assert runner.sampling == {GREEDY}
    assert [(prompt.ordinal, prompt.samples[0].accuracy) for prompt in evaluation.prompts] == [(n, n) for n in range(5)]
    assert (evaluation.accuracy, evaluation.mean_response_tokens, evaluation.num_prompts) == (2, 20, 5)
    assert evaluation.versions == (7, 8)
    assert evaluation.metrics == {}
    run_virtual(evaluator.evaluate())
    assert evaluator.num_requests == 10


def test_of_several_samples_every_data_source_has_its_scores() -> None:
    evaluator = make_evaluator(FakeRunner(), 3, num_samples=4)
    evaluation = run_virtual(evaluator.evaluate())
    assert evaluator.num_requests == 12
    assert evaluation.accuracy == pytest.approx((0 + 1 / 4 + 2 / 4) / 3)
    assert evaluation.metrics == pytest.approx(
        {
            **{"val/avg@4": 1 / 4, "val/pass@4": 1 / 2, "val/maj@4": 1 / 4},
            **{"val/odd/avg@4": 1 / 4, "val/odd/pass@4": 1, "val/odd/maj@4": 1 / 4},
        }
    )


def test_replicas_without_a_share_are_left_alone() -> None:
    runner = FakeRunner()
    assert run_virtual(make_evaluator(runner, 2).evaluate()).num_prompts == 2
    assert runner.asked == {"a": [0], "b": [1]}


def test_those_out_of_service_are_not_asked() -> None:
    """They serve another version, or none."""
    runner, router = FakeRunner(), make_router()
    evaluator = make_evaluator(runner, 4, router)

    async def main() -> None:
        await router.eject("a", RuntimeError("not verified"))
        assert (await evaluator.evaluate()).num_prompts == 4
        assert runner.asked == {"b": [0, 2], "c": [1, 3]}
        runner.asked.clear()
        await router.admit("a")
        await router.remove("c", RuntimeError("died"))
        assert (await evaluator.evaluate()).num_prompts == 4
        assert runner.asked == {"a": [0, 2], "b": [1, 3]}

    run_virtual(main())


def test_an_evaluation_past_its_deadline_names_the_key() -> None:
    with pytest.raises(TimeoutError, match=r"evaluation took longer than evaluation\.timeout_s=5"):
        run_virtual(make_evaluator(FakeRunner(seconds=6), 2).evaluate())


def test_rewards_that_fail_count_under_the_budget() -> None:
    evaluator = make_evaluator(FakeRunner(failing=1), 3)
    run_virtual(evaluator.evaluate())
    run_virtual(evaluator.evaluate())
    with pytest.raises(RewardFailuresError, match=r"^3 rewards failed, .*max_failed_rewards=0.25 .* 8 .*: a failed$"):
        run_virtual(evaluator.evaluate())
