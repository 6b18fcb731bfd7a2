"""Every held-out prompt is asked, spread over the replicas, with a deadline, whoever dies; what the answers say."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rollout.errors import (
    AgentWorkerLostError,
    NoReplicaLeftError,
    NoTokensError,
    ReplicaLostError,
    TooFewReplicasError,
)
from rollout.evaluation.evaluator import Evaluation
from rollout.failures import RewardFailuresError
from rollout.replica.lifecycle import Replica, ReplicaState
from rollout.router import ReplicaRouter
from rollout.types import EvaluatedPrompt, EvaluatedSample
from tests.support.evaluations import GREEDY, FakeEvaluationRunner, make_evaluator, make_router
from tests.support.fakes import now, run_virtual, settle


def test_every_prompt_is_asked_once_and_the_means_are_over_prompts_not_replicas() -> None:
    runner = FakeEvaluationRunner()
    evaluator = make_evaluator(runner, 5)
    evaluation = run_virtual(evaluator.evaluate())
    assert runner.asked == [("a", [0, 3]), ("b", [1, 4]), ("c", [2])]
    assert runner.sampling == {GREEDY}
    assert [(prompt.ordinal, prompt.samples[0].accuracy) for prompt in evaluation.prompts] == [(n, n) for n in range(5)]
    assert (evaluation.accuracy, evaluation.mean_response_tokens, evaluation.num_prompts) == (2, 20, 5)
    assert evaluation.versions == (7, 8)
    assert evaluation.metrics == {"val/avg@1": 2, "val/odd/avg@1": 2}, "0, 2 and 4; 1 and 3 of another data source"
    run_virtual(evaluator.evaluate())
    assert evaluator.num_requests == 10


def test_an_evaluation_without_a_token_says_why() -> None:
    class AsksNothing(FakeEvaluationRunner):
        async def evaluate(self, *args: Any, **kwargs: Any) -> list[EvaluatedPrompt]:
            sample = EvaluatedSample(accuracy=0, answer=None, num_tokens=0, error="OSError: no world")
            return [replace(prompt, samples=(sample,)) for prompt in await super().evaluate(*args, **kwargs)]

    evaluator = make_evaluator(AsksNothing(), 2)
    with pytest.raises(NoTokensError, match="in the whole evaluation; the first sample failed with OSError: no world$"):
        run_virtual(evaluator.evaluate())


def test_what_agents_measured_is_a_mean_over_the_samples_that_have_it() -> None:
    measured = [{"turns": 2.0}, {"turns": 4.0, "calls": 1.0}, {}]
    samples = [EvaluatedSample(accuracy=1, answer=None, num_tokens=1, agent_metrics=some) for some in measured]
    prompts = [EvaluatedPrompt(ordinal=n, data_source="", samples=(sample,)) for n, sample in enumerate(samples)]
    evaluation = Evaluation(prompts=tuple(prompts), pinned=True)
    assert evaluation.agent_metrics == {"calls": 1.0, "turns": 3.0}
    assert evaluation.metrics == {}, "one sample of one data source: there is nothing to tell apart"


def test_of_several_samples_every_data_source_has_its_scores() -> None:
    evaluator = make_evaluator(FakeEvaluationRunner(), 3, num_samples=4)
    evaluation = run_virtual(evaluator.evaluate())
    assert evaluator.num_requests == 12
    assert evaluation.accuracy == pytest.approx((0 + 1 / 4 + 2 / 4) / 3)
    assert evaluation.metrics == pytest.approx(
        {
            **{"val/avg@4": 1 / 4, "val/pass@4": 1 / 2, "val/maj@4": 1 / 4},
            **{"val/odd/avg@4": 1 / 4, "val/odd/pass@4": 1, "val/odd/maj@4": 1 / 4},
        }
    )


async def test_those_out_of_service_are_not_asked() -> None:
    """They serve another version, or none."""
    runner, router = FakeEvaluationRunner(), make_router()
    evaluator = make_evaluator(runner, 4, router)
    await router.eject("a", RuntimeError("not verified"))
    assert (await evaluator.evaluate()).num_prompts == 4
    assert runner.asked == [("b", [0, 2]), ("c", [1, 3])]
    runner.asked.clear()
    await router.admit("a")
    await router.remove("c", RuntimeError("died"))
    assert (await evaluator.evaluate()).num_prompts == 4
    assert runner.asked == [("a", [0, 2]), ("b", [1, 3])]


@pytest.mark.parametrize("is_starting", [False, True])
def test_an_evaluation_past_its_deadline_names_the_key(is_starting: bool) -> None:
    """Test answers that come too late, and a replica that never comes into service."""
    router = ReplicaRouter({"a": Replica(name="a")}, max_inflight=8) if is_starting else make_router()
    with pytest.raises(TimeoutError, match=r"evaluation took longer than evaluation\.timeout_s=5"):
        run_virtual(make_evaluator(FakeEvaluationRunner(seconds=6), 2, router).evaluate())


def test_rewards_that_fail_count_under_the_budget() -> None:
    evaluator = make_evaluator(FakeEvaluationRunner(failing=1), 3)
    run_virtual(evaluator.evaluate())
    run_virtual(evaluator.evaluate())
    with pytest.raises(RewardFailuresError, match=r"^3 rewards failed, .*max_failed_rewards=0.25 .* 8 .*: a failed$"):
        run_virtual(evaluator.evaluate())


def test_what_a_lost_replica_leaves_is_asked_of_another_and_nothing_else_is() -> None:
    runner = FakeEvaluationRunner(errors={"b": [ReplicaLostError("b died")]})
    evaluator = make_evaluator(runner, 5, router := make_router())
    evaluation = run_virtual(evaluator.evaluate())
    assert [prompt.ordinal for prompt in evaluation.prompts] == [0, 1, 2, 3, 4]
    assert runner.asked == [("a", [0, 3]), ("b", [1, 4]), ("c", [2]), ("c", [1, 4])]
    assert router.healthy == ["a", "c"] and evaluator.num_requests == 5 + 2


def test_a_lost_agent_worker_costs_another_try_under_other_names() -> None:
    runner = FakeEvaluationRunner(errors={"a": [AgentWorkerLostError("an agent worker died")] * 2})
    evaluator = make_evaluator(runner, 2, router := make_router())
    run_virtual(evaluator.evaluate())
    run_virtual(evaluator.evaluate())
    assert runner.asked == [("a", [0]), ("b", [1]), ("a", [0]), ("a", [0]), ("a", [0]), ("b", [1])]
    assert len(set(runner.attempts)) == len(runner.attempts), "of the evaluation before, too"
    assert router.healthy == ["a", "b", "c"]


@pytest.mark.parametrize("dies_s", [None, 1.0])
async def test_where_no_replica_is_in_service_one_is_waited_for(dies_s: float | None) -> None:
    """No replica was in service from the beginning, or the only one died under the evaluation."""
    runner = FakeEvaluationRunner(errors={"a": [ReplicaLostError("a died")]})
    replicas = {"a": Replica(name="a", state=ReplicaState.READY), "replacement": Replica(name="replacement")}
    router = ReplicaRouter(replicas, max_inflight=8)
    if dies_s is None:
        await router.remove("a", RuntimeError("died before"))
    evaluating = asyncio.create_task(make_evaluator(runner, 2, router).evaluate())
    await asyncio.sleep(3)
    assert router.healthy == [] and not evaluating.done()
    await router.admit("replacement")
    assert (await evaluating).num_prompts == 2 and now() == 4
    assert runner.asked[-1] == ("replacement", [0, 1])


def test_too_few_that_are_left_end_it() -> None:
    async def too_few(name: str, error: BaseException) -> None:
        raise TooFewReplicasError(f"without {name}") from error

    runner = FakeEvaluationRunner(errors={"a": [ReplicaLostError("a died")]})
    with pytest.raises(TooFewReplicasError, match="without a"):
        run_virtual(make_evaluator(runner, 2, on_lost=too_few).evaluate())
    runner = FakeEvaluationRunner(errors={name: [ReplicaLostError(f"{name} died")] for name in "abc"})
    with pytest.raises(NoReplicaLeftError, match="a died.*b died.*c died"):
        run_virtual(make_evaluator(runner, 3, make_router()).evaluate())


def test_of_pinned_replicas_only_those_that_are_left_are_asked_again() -> None:
    errors: dict[str, list[Exception]] = {"b": [ReplicaLostError("b died")]}
    runner = FakeEvaluationRunner(errors=errors)
    assert run_virtual(make_evaluator(runner, 4, make_router()).evaluate(["b", "c"])).num_prompts == 4
    assert runner.asked == [("b", [0, 2]), ("c", [1, 3]), ("c", [0, 2])]


def test_when_all_pinned_replicas_are_lost_the_caller_decides() -> None:
    """Replica c is lost under one share while another share finds an agent worker lost."""
    worker_died = AgentWorkerLostError("an agent worker died")
    errors = {"b": [ReplicaLostError("b died")], "c": [worker_died, ReplicaLostError("c died"), worker_died]}
    runner = FakeEvaluationRunner(errors=errors)
    with pytest.raises(ReplicaLostError, match="every replica that evaluated was lost"):
        run_virtual(make_evaluator(runner, 4, make_router()).evaluate(["b", "c"]))
    assert [name for name, _ in runner.asked] == ["b", "c", "c", "c"]


async def test_who_drains_finishes_its_share_first() -> None:
    router = make_router()
    evaluating = asyncio.create_task(make_evaluator(FakeEvaluationRunner(), 3, router).evaluate())
    await settle()
    await router.eject("b", RuntimeError("draining"))
    await router.emptied("b")
    assert now() == 1
    assert (await evaluating).num_prompts == 3


async def test_an_evaluation_takes_no_room_from_the_training() -> None:
    router = ReplicaRouter(["a"], max_inflight=8)
    evaluating = asyncio.create_task(make_evaluator(FakeEvaluationRunner(), 100, router).evaluate())
    await settle()
    assert await router.acquire(8) == "a" and now() == 0
    await evaluating


def test_each_source_is_asked_by_itself_and_reported() -> None:
    """With the sampling of its own; its data sets are reported below it."""
    runner = FakeEvaluationRunner()
    evaluator = make_evaluator(runner, 6)
    evaluator.prompts = [
        replace(prompt, source="ab"[place // 3], data_source="odd" * (place % 2))
        for place, prompt in enumerate(evaluator.prompts)
    ]
    evaluator.sources = {"a": replace(GREEDY, max_tokens=5), "b": replace(GREEDY, max_tokens=7)}
    evaluation = run_virtual(evaluator.evaluate())
    assert sorted(runner.asked) == [("a", [0]), ("a", [3]), ("b", [1]), ("b", [4]), ("c", [2]), ("c", [5])]
    assert {sampling.max_tokens for sampling in runner.sampling} == {5, 7}
    assert evaluation.metrics == {"val/a/avg@1": 1, "val/a/odd/avg@1": 1, "val/b/avg@1": 4, "val/b/odd/avg@1": 4}
