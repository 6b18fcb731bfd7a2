"""Whatever a process starts ends with it, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from configs.runtime.environment import REPO_ROOT
from rollout.actors.processes import GUARD_INTERVAL_S, INTERVALS_PER_SCAN
from tests.support.whole_runs import command_of, survivors

pytestmark = pytest.mark.slow

GUARD = "rollout.actors.processes"
OWNER = """
import subprocess, sys, time
from pathlib import Path
from rollout.actors.processes import end_descendants_with_this
end_descendants_with_this(Path(sys.argv[1]))
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", stubborn])
subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"])
sys.stdin.read(1)
"""


def start(folder: Path) -> subprocess.Popen[str]:
    folder.mkdir()
    (folder / "socket").touch()
    return subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdin=subprocess.PIPE, text=True)


def test_descendants_and_their_guard_end_with_their_owner_and_its_folder_goes(tmp_path: Path) -> None:
    """They were started after the guard, one of them by another."""
    owners = [start(tmp_path / str(number)) for number in range(3)]
    time.sleep((INTERVALS_PER_SCAN + 2) * GUARD_INTERVAL_S)
    children = [psutil.Process(owner.pid).children(recursive=True) for owner in owners]
    guards = [guard for owner in owners for guard in guards_of(owner.pid)]
    try:
        assert [len(of_owner) for of_owner in children] == [4] * 3, "two of the owner, two of the shell"
        assert len(guards) == 3
        killed, terminated, returning = owners
        killed.kill()
        terminated.send_signal(signal.SIGTERM)
        assert returning.stdin is not None
        returning.stdin.close()
        for owner, of_owner in zip(owners, children, strict=True):
            owner.wait(30)
            assert survivors(of_owner) == []
        assert survivors(guards) == [] and list(tmp_path.iterdir()) == []
    finally:
        for process in [*owners, *sum(children, [])]:
            if isinstance(process, subprocess.Popen) or process.is_running():
                process.kill()
        for owner in owners:
            owner.wait()
            if owner.stdin is not None:
                owner.stdin.close()


def guards_of(owner: int) -> list[psutil.Process]:
    """Return the processes that guard another one, whose children they are not."""
    return [process for process in psutil.process_iter() if f"-m {GUARD} {owner} " in command_of(process)]


OF_A_REWARD = """
import asyncio, subprocess, sys
from configs.schema import RolloutConfig
from rollout.actors.processes import end_descendants_with_this
from rollout.rewards.pool import RewardPool
from rollout.types import Prompt


def starts(prompt, text):
    if text == "start":
        subprocess.Popen(["sleep", "3333"])
    return 1.0


async def main():
    pool = RewardPool("owner_of_a_reward:starts", RolloutConfig(reward_processes=1), 60.0, "rollout.reward_timeout_s")
    prompt = Prompt(ordinal=0, text="", token_ids=(), ground_truth="")
    for _ in range(2):
        text = await asyncio.to_thread(sys.stdin.readline)
        result = await pool.score(prompt, text.strip(), [])
        print(result.reward, flush=True)
    await asyncio.sleep(600)


if __name__ == "__main__":
    end_descendants_with_this()
    asyncio.run(main())
"""


def test_what_a_reward_has_started_ends_with_the_owner_of_its_process(tmp_path: Path) -> None:
    """It was started a moment ago, by a process that the kernel ends before the guard."""
    (tmp_path / "owner_of_a_reward.py").write_text(OF_A_REWARD)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO_ROOT}"}
    command = [sys.executable, str(tmp_path / "owner_of_a_reward.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        owner.stdin.write("nothing\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "1.0\n"
        time.sleep((INTERVALS_PER_SCAN + 2) * GUARD_INTERVAL_S)
        owner.stdin.write("start\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "1.0\n"
        started = psutil.Process(owner.pid).children(recursive=True)
        assert any(process.cmdline() == ["sleep", "3333"] for process in started)
        owner.kill()
        owner.wait()
        assert survivors(started) == []
