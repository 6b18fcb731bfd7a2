"""Environments of verifiers 0.4 over sessions: the real package's where it is installed, else those of a fake of it."""

import asyncio
import os
import sys
from typing import Any

import pytest

from rollout.agents.loop import Episode
from rollout.data.rows import Columns, load_rows
from rollout.environments import verifiers
from rollout.sessions.harness import Connection, FunctionHarness, HarnessTask
from tests.support import fake_verifiers_v1
from tests.support.environments import error_of
from tests.support.harnesses import Policy, episode_task, harness_loop, run_one
from tests.support.paths import ROOT
from tests.support.real_clock import on_real_clock
from tests.support.sequences import only
from tests.support.verifiers_versions import HAS_V1

ENV = "looks-again"


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers, "_loaded", {})
    monkeypatch.syspath_prepend(ROOT / "tests/support/plugins")
    if not HAS_V1:
        monkeypatch.setitem(sys.modules, "verifiers", fake_verifiers_v1)
        monkeypatch.setitem(sys.modules, "verifiers.v1", fake_verifiers_v1)


def looks_again(text: str, request: object) -> str:
    return "It is 56." if "Look again." in text else "Maybe 41."


def rows(kind: str = "right") -> list[Any]:
    entries = f'{{"env": "{ENV}", "args": {{"taskset": {{"kind": "{kind}"}}}}}}'
    return load_rows(entries, Columns(prompt="prompt", answer="answer"), "rollout.environments.verifiers:rows")


class OfRow:
    """The harness of rollout.agent, with the second row as its task."""

    def __init__(self, kind: str = "right", env: str = ENV):
        self._row = rows(kind)[1]
        args = {"env": env, "args": {"taskset": {"kind": kind}}}
        self._harness = FunctionHarness("rollout.environments.verifiers:agent", args)

    async def run(self, task: HarnessTask, connection: Connection) -> object:
        whole = HarnessTask(prompt=task.prompt, ground_truth="", ordinal=1, index=0, extra=self._row.extra)
        return await self._harness.run(whole, connection)


def run(policy: Policy, kind: str = "right") -> Episode:
    return asyncio.run(run_one(OfRow(kind), policy))


def test_a_rollout_is_one_sequence_with_the_reward_and_the_metrics_of_its_task() -> None:
    policy = Policy(looks_again)
    episode = run(policy)
    assert episode.result is not None and (episode.result.reward, episode.result.error) == (1.0, None)
    assert episode.result.metrics == {"right": 1.0, "num_turns": 2.0}
    assert only(episode).loss_mask.sum() == sum(completion.num_tokens for completion in policy.sampled.values())
    assert "8 times 7?" in policy.tokenizer.decode(policy.prompts[0])


@on_real_clock
async def test_rollouts_at_once_have_sessions_of_their_own_and_leave_no_key_behind() -> None:
    before = set(os.environ)
    async with harness_loop(OfRow()) as loop:
        policies = [Policy(looks_again) for _ in range(4)]
        running = [loop.run_episode(episode_task(index), policy.generate) for index, policy in enumerate(policies)]
        episodes = await asyncio.gather(*running)
    assert [episode.result and episode.result.reward for episode in episodes] == [1.0] * 4
    assert all(len(episode.sequences) == 1 for episode in episodes)
    assert set(os.environ) == before


@pytest.mark.parametrize(("kind", "error"), [("broken", "the sandbox is gone"), ("judged", "no judge answers")])
def test_a_harness_or_a_reward_that_fails_is_not_reward_0(kind: str, error: str) -> None:
    message = error_of(run(Policy(looks_again), kind))
    assert message.startswith("RolloutError: the environment looks-again failed: ") and error in message


def test_its_tasks_are_the_rows() -> None:
    assert [row.question for row in rows()] == ["6 times 7?", "8 times 7?"]
    assert rows()[1].extra[verifiers.ROW]["answer"] == "56"


def test_a_row_of_other_data_is_refused() -> None:
    harness = FunctionHarness("rollout.environments.verifiers:agent", {"env": ENV})
    error = error_of(asyncio.run(run_one(harness, Policy(looks_again))))
    assert "needs rows of data.loader=rollout.environments.verifiers:rows" in error


def test_a_taskset_that_is_not_there_is_refused_by_its_key() -> None:
    with pytest.raises(ValueError, match=r"rollout\.agent_args\.env=looks-agian: cannot be loaded: ModuleNotFoundErr"):
        verifiers.load("looks-agian", {})


def test_a_taskset_has_no_splits() -> None:
    with pytest.raises(ValueError, match="data.train_files=looks-again@eval: a taskset has no splits"):
        verifiers.rows("looks-again@eval")
