"""Environments of verifiers before 0.4 over sessions: of the real package where it is installed, else of a fake."""

import asyncio
import importlib
import re
import signal
import sys
from typing import Any

import pytest

from rollout.agents.loop import Episode
from rollout.data.rows import Columns, load_rows
from rollout.environments import verifiers
from rollout.sessions.harness import Connection, FunctionHarness, HarnessTask
from tests.support import fake_verifiers, verifiers_world
from tests.support.environments import error_of
from tests.support.harnesses import Policy, episode_task, harness_loop, run_one
from tests.support.real_clock import on_real_clock
from tests.support.sequences import only
from tests.support.verifiers_versions import HAS_LEGACY

ENV = "tests.support.verifiers_world"


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_LEGACY:
        monkeypatch.setitem(sys.modules, "verifiers", fake_verifiers)
    monkeypatch.setattr(verifiers, "_loaded", {})
    verifiers_world.loads.clear()


def harness(**args: Any) -> FunctionHarness:
    """Make the harness as rollout.agent_args does."""
    return FunctionHarness("rollout.environments.verifiers:agent", {"env": ENV, "args": args})


def looks_again(text: str, request: object) -> str:
    return "It is 42." if "Look again." in text else "Maybe 41."


def run(policy: Policy, **args: Any) -> Episode:
    return asyncio.run(run_one(harness(**args), policy))


def test_a_rollout_is_one_sequence_with_the_reward_and_the_metrics_of_the_rubric() -> None:
    policy = Policy(looks_again)
    episode = run(policy)
    assert episode.result is not None and (episode.result.reward, episode.result.error) == (1.0, None)
    metrics = episode.result.metrics
    assert (metrics["right"], metrics["num_messages"], metrics["empty_answer"]) == (1.0, 3.0, 0.0)
    assert only(episode).loss_mask.sum() == sum(completion.num_tokens for completion in policy.sampled.values())
    assert "What is 6 times 7?" in policy.tokenizer.decode(policy.prompts[0])


@on_real_clock
async def test_an_environment_is_loaded_once_per_process_whatever_runs_at_once() -> None:
    async with harness_loop(harness()) as loop, asyncio.TaskGroup() as group:
        for index in range(4):
            group.create_task(loop.run_episode(episode_task(index), Policy(looks_again).generate))
    assert verifiers_world.loads == ["right"]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("broken", "RolloutError: the environment tests.support.verifiers_world failed: Error: the sandbox is gone"),
        (
            "judged",
            "RolloutError: the rubric of tests.support.verifiers_world failed: ConnectionError: no judge answers",
        ),
        (
            "best",
            "ValueError: rollout.agent_args.env=tests.support.verifiers_world: its rubric compares the rollouts of",
        ),
        (3, "unexpected keyword argument"),
    ],
)
def test_an_environment_or_a_rubric_that_fails_is_not_reward_0(kind: str | int, error: str) -> None:
    args = {"kind": kind} if isinstance(kind, str) else {"kinds": kind}
    assert error in error_of(run(Policy(looks_again), **args))


def test_an_empty_answer_is_the_policys() -> None:
    episode = run(Policy(lambda text, request: ""))
    assert episode.result is not None and (episode.result.reward, episode.result.error) == (0.0, None)
    assert episode.result.metrics["empty_answer"] == 1


def test_an_environment_that_scores_nothing_leaves_the_reward_to_the_run() -> None:
    assert run(Policy(looks_again), kind="unscored").result is None


def test_the_handlers_of_signals_stay_those_of_the_run() -> None:
    mine = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    verifiers.load(ENV, {})
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == mine
    assert signal.signal.__module__ == "signal", "it is the original again"


def load(entries: str) -> list[Any]:
    return load_rows(entries, Columns(prompt="prompt", answer="answer"), "rollout.environments.verifiers:rows")


@pytest.mark.parametrize(
    ("entries", "questions"),
    [
        (ENV, ["6 times 7?", "8 times 7?"]),
        (f"{ENV}@train", ["6 times 7?", "8 times 7?"]),
        (f"{ENV}@eval", ["6 times 7?"]),
        (f'{{"env": "{ENV}", "args": {{"kind": "judged"}}, "split": "eval"}}', ["6 times 7?"]),
    ],
)
def test_its_data_set_gives_the_rows(entries: str, questions: list[str]) -> None:
    rows = load(entries)
    assert [row.question for row in rows] == questions and rows[0].ground_truth == "42"
    assert rows[0].data_source == ENV


def test_an_answer_of_zero_is_an_answer() -> None:
    rows = load(f'{{"env": "{ENV}", "args": {{"kind": "numbers"}}}}')
    assert [row.ground_truth for row in rows] == ["0", "56"]


def test_a_rollout_of_its_own_row_gets_the_whole_row() -> None:
    row = load(ENV)[1]
    policy = Policy(lambda text, request: "It is 56.")

    class OfRow:
        async def run(self, task: HarnessTask, connection: Connection) -> object:
            whole = HarnessTask(prompt="", ground_truth="", ordinal=1, index=0, extra=row.extra)
            return await harness().run(whole, connection)

    episode = asyncio.run(run_one(OfRow(), policy))
    assert episode.result is not None and episode.result.reward == 1
    assert "8 times 7?" in policy.tokenizer.decode(policy.prompts[0])
    assert row.extra[verifiers.ROW]["info"] == {"level": 1}


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        (f"{ENV}@test", "the splits are train, eval"),
        ('{"name": "x"}', r"has keys \['name'\]; allowed: env, args, split"),
    ],
)
def test_entries_that_say_no_data_set_are_refused(entries: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        verifiers.rows(entries)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    assert "pip install verifiers" in error_of(run(Policy(looks_again)))


@pytest.mark.parametrize("version", ["0.1.9.post3", "0.1.12", "0.0.0+unknown"])
def test_a_version_that_is_too_old_is_refused_with_the_one_that_is_wanted(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("verifiers"), "__version__", version)
    with pytest.raises(ImportError, match=rf"verifiers {re.escape(version)} is installed, and 0\.1\.14 or later is"):
        verifiers.load(ENV, {})
    assert verifiers_world.loads == []
