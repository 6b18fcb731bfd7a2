"""Rewards in processes of their own: what hangs or dies is ended, named, and costs no other response its reward."""

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from configs.rollout import RewardPlace
from configs.schema import RolloutConfig
from rollout.rewards.base import RewardResult
from rollout.rewards.scoring import load_scorer
from tests.support.fakes import make_prompt
from tests.support.paths import ROOT
from tests.support.real_clock import on_real_clock

HOSTILE = RolloutConfig(reward="tests.support.rewards:hostile", reward_processes=2)
ALONE = replace(HOSTILE, reward_processes=1)
WHERE = "tests.support.rewards:hostile of prompt 17: "


def outcomes(rollout: RolloutConfig, *texts: str, place: Path = Path()) -> list[float | str]:
    """Return the rewards or errors. `place`: the ground truth, for rewards that leave something there."""
    prompt = replace(make_prompt(17), ground_truth=str(place))
    results = asyncio.run(load_scorer(rollout).score([(prompt, text) for text in texts]))
    return [result.reward if result.error is None else result.error for result in results]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("hold the GIL", "TimeoutError: took longer than rollout.reward_timeout_s=5"),
        ("end the process", "RewardProcessError: ended its process: exit code 3"),
        ("end as if all were well", "RewardProcessError: ended its process: exit code 0"),
    ],
)
def test_what_hangs_or_ends_its_process_fails_alone(text: str, error: str) -> None:
    """The response beside it is right, and would be late if it had to wait."""
    assert outcomes(replace(HOSTILE, reward_timeout_s=5), "ab", text, "be slow", "d") == [2.0, WHERE + error, 7.0, 1.0]


def test_what_cannot_be_sent_to_the_worker_is_an_error_of_its_response() -> None:
    raised, unsendable, good = outcomes(ALONE, "raise the unprintable", "return an object", "abc")
    assert raised == WHERE + "UnprintableError, whose text cannot be shown: its __str__ raised RuntimeError"
    assert str(unsendable).startswith(WHERE + "TypeError: a reward must be a finite number, not <object object")
    assert good == 3.0


def test_a_reward_that_always_hangs_fails_its_group_after_a_few_deadlines() -> None:
    errors = outcomes(replace(HOSTILE, reward_timeout_s=0.3), *["hold the GIL"] * 9)
    assert str(errors[0]).endswith("TimeoutError: took longer than rollout.reward_timeout_s=0.3")
    assert str(errors[8]).startswith(WHERE + "RewardProcessError: not scored: 3 processes were lost to its group")


@on_real_clock
async def test_a_group_whose_responses_come_one_by_one_costs_no_more_processes() -> None:
    group = load_scorer(ALONE).for_group()
    errors = [(await group.score([(make_prompt(17), "end the process")]))[0].error for _ in range(4)]
    assert errors[:3] == [WHERE + "RewardProcessError: ended its process: exit code 3"] * 3
    assert "not scored: 3 processes were lost to its group" in str(errors[3])


OWN = """
import os, pathlib, signal, subprocess, sys, threading, time

local = lambda prompt, text: float(len(text))  # which cannot be pickled, and needs not

class Judge:
    def __init__(self):
        self.lock = threading.Lock()  # nor can this

    def __call__(self, prompt, text):
        with self.lock:
            return float(len(text))

judge = Judge()

def meets(prompt, text):
    here = pathlib.Path(prompt.ground_truth)
    (here / f"{os.getpid()}.came").touch()
    while len(list(here.glob("*.came"))) < 4:
        time.sleep(0.01)
    return 1.0

def alarmed(prompt, text):
    def late(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        time.sleep(60)
    except TimeoutError:
        return 1.0

def forgets_its_alarm(prompt, text):
    return float(signal.alarm(600))  # the rest of the one before

def leaves_a_child(prompt, text):
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path(prompt.ground_truth).write_text(str(child.pid))
    if text == "and hangs":
        time.sleep(600)
    os._exit(3)

def leaves_a_daemon(prompt, text):
    if os.fork() == 0:
        os.setsid()
        pathlib.Path(prompt.ground_truth).write_text(str(os.getpid()))
        time.sleep(600)
    while not (os.path.exists(prompt.ground_truth) and os.path.getsize(prompt.ground_truth)):
        time.sleep(0.01)
    os._exit(3)

def forks(prompt, text):
    return float(os.fork() == 0)

async def later(prompt, text):
    return float(os.getpid())

def gives_an_awaitable(prompt, text):
    return later(prompt, text)

def knows_the_token(prompt, text):
    child = subprocess.run([sys.executable, "-c", "import os; print(*os.environ)"], capture_output=True, text=True)
    return float("SLIPSTREAM_TOKEN" in os.environ or "SLIPSTREAM_TOKEN" in child.stdout or "PATH" not in child.stdout)

if os.environ.get("OWNER") == "ends":
    os._exit(0)

def heavy(prompt, text):
    return float(bool({"torch", "vllm", "ray", "transformers"} & set(sys.modules)))

if os.environ.get("OWNER") == str(os.getppid()):
    raise OSError("no such judge")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "own_process_rewards.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name: replace(ALONE, reward=f"own_process_rewards:{name}")


def test_a_reward_needs_no_pickling_and_its_process_loads_nothing_heavy(own: Any) -> None:
    assert outcomes(own("local"), "ab", "c") == [2.0, 1.0]
    assert outcomes(own("judge"), "ab", "c") == [2.0, 1.0]
    assert outcomes(own("heavy"), "") == [0.0]
    assert outcomes(own("gives_an_awaitable"), "") != [float(os.getpid())]
    in_worker = replace(own("gives_an_awaitable"), reward_runs_in=RewardPlace.loop)
    assert outcomes(in_worker, "a", "b") == [float(os.getpid())] * 2
    assert outcomes(own("later"), "") == [float(os.getpid())], "an async one is awaited in the worker"


def test_a_group_is_scored_in_as_many_processes_as_there_may_be(own: Any, tmp_path: Path) -> None:
    assert outcomes(replace(own("meets"), reward_processes=4), *"abcd", place=tmp_path) == [1.0] * 4


def test_a_reward_may_set_time_limits_by_signals_and_fork(own: Any) -> None:
    assert outcomes(own("alarmed"), *"abcdefgh") == [1.0] * 8
    assert outcomes(own("forgets_its_alarm"), "a", "b", "c") == [0.0] * 3
    assert outcomes(own("forks"), *"abcd") == [0.0] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "timeout_s", "error"),
    [
        ("leaves_a_child", "and hangs", 2, "TimeoutError: took longer than rollout.reward_timeout_s=2"),
        ("leaves_a_child", "and dies", 600, "RewardProcessError: ended its process: exit code 3"),
        ("leaves_a_daemon", "and dies", 600, "RewardProcessError: ended its process: exit code 3"),
    ],
)
def test_what_a_lost_reward_has_started_is_ended_or_does_not_hide_the_loss(
    own: Any, tmp_path: Path, name: str, text: str, timeout_s: float, error: str
) -> None:
    [told] = outcomes(replace(own(name), reward_timeout_s=timeout_s), text, place=tmp_path / "pid")
    assert str(told).endswith(error)
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    if name == "leaves_a_daemon":  # it has left the process group
        return child.kill()
    psutil.wait_procs([child], timeout=20)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def reward_processes(owner: psutil.Process) -> list[psutil.Process]:
    return [child for child in owner.children() if "multiprocessing.spawn" in " ".join(child.cmdline())]


@on_real_clock
async def test_processes_that_ended_while_idle_cost_no_group_anything() -> None:
    scorer = load_scorer(HOSTILE)
    await scorer.score([(make_prompt(17), "be slow")] * 4)
    idle = reward_processes(psutil.Process())
    for process in idle:
        process.kill()
    assert len(idle) == 2
    assert await scorer.score([(make_prompt(17), "ab")] * 8) == [RewardResult(reward=2.0)] * 8


def test_a_reward_that_cannot_be_loaded_in_its_process_says_why(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWNER", str(os.getpid()))
    [error] = outcomes(own("judge"), "a")
    assert "own_process_rewards:judge of prompt 17: NotStartedError: cannot be loaded: ValueError: " in str(error)
    assert "own_process_rewards cannot be imported: OSError: no such judge" in str(error)


def test_a_module_that_ends_its_process_is_no_reason_to_wait(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = load_scorer(own("judge"))
    monkeypatch.setenv("OWNER", "ends")  # only in the processes: here the module has been loaded
    [result] = asyncio.run(scorer.score([(make_prompt(17), "a")]))
    assert str(result.error).endswith("NotStartedError: ended its process before it took a response")


def test_math_verify_that_does_not_start_has_failed_and_the_answer_is_not_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what a response itself costs is given up as wrong."""

    def error(**options: Any) -> str:
        scorer = load_scorer(RolloutConfig(reward="math_verify", reward_processes=1, **options))
        [result] = asyncio.run(scorer.score([(make_prompt(17), "\\boxed{34}")]))
        return str(result.error)

    slow = "math_verify of prompt 17: NotStartedError: took longer than rollout.start_timeout_s=0.01 to start"
    assert error(start_timeout_s=0.01, verify_timeout_s=0.01) == slow
    (tmp_path / "math_verify.py").write_text("raise ImportError('no such package')")
    monkeypatch.syspath_prepend(tmp_path)
    missing = "math_verify of prompt 17: NotStartedError: cannot be loaded: ImportError: no such package"
    assert error() == missing


def test_a_reward_does_not_know_the_token_of_the_servers(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "secret")
    assert outcomes(own("knows_the_token"), "a") == [0.0]


def test_a_cancelled_group_ends_the_process_of_its_reward() -> None:
    async def main() -> list[RewardResult]:
        scorer = load_scorer(ALONE)
        await scorer.score([(make_prompt(17), "a")])
        [process] = reward_processes(psutil.Process())
        task = asyncio.create_task(scorer.score([(make_prompt(17), "hold the GIL")]))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.01)
        return await scorer.score([(make_prompt(17), "ab")])

    assert asyncio.run(main()) == [RewardResult(reward=2.0)]
    assert not reward_processes(psutil.Process()), "processes end with the event loop"


OWNER = """
import asyncio
from configs.schema import RolloutConfig
from rollout.rewards.scoring import load_scorer
from tests.support.fakes import make_prompt

async def main():
    scorer = load_scorer(RolloutConfig(reward="tests.support.rewards:hostile", reward_processes=1))
    await scorer.score([(make_prompt(0), "a")])
    hanging = asyncio.ensure_future(scorer.score([(make_prompt(0), "hold the GIL")]))
    await asyncio.sleep(0.2)
    print("hangs", flush=True)
    await hanging

asyncio.run(main())
"""


def test_processes_end_with_their_owner_also_while_they_hold_the_gil() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "hangs\n"
    [process] = reward_processes(psutil.Process(owner.pid))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    process.wait(timeout=20)
