"""Agents that call sys.exit, in whatever task: their episode has failed, and the others go on."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout.rewards.base import RewardResult
from rollout.sessions.containment import exits_contained
from rollout.sessions.harness import FunctionHarness
from tests.support.episodes import episodes_of
from tests.support.harnesses import Policy, episode_task, harness_loop
from tests.support.real_clock import on_real_clock

AGENT = """
import asyncio, sys

async def asks(client):
    messages = [{"role": "user", "content": "Hi"}]
    await client.chat.completions.create(model="any", messages=messages)

async def leaves(how):
    await asyncio.sleep(0)
    if how == "interrupt":
        raise KeyboardInterrupt
    sys.exit(0)

async def agent(task, client, how):
    await asks(client)
    if task.index == 1:
        await asyncio.sleep(0.2)
        return 1.0
    match how:
        case "itself" | "interrupt":
            await leaves(how)
        case "gather":
            await asyncio.gather(leaves(how), asyncio.sleep(1))
        case "group":
            async with asyncio.TaskGroup() as group:
                group.create_task(leaves(how))
        case "exception group":
            raise BaseExceptionGroup("of anyio", [SystemExit(0)])
        case "thread":
            await asyncio.to_thread(sys.exit, 3)
        case "forgotten":
            asyncio.create_task(leaves(how))
            await asyncio.sleep(0.1)
            return 0.5
"""


@pytest.mark.parametrize("how", ["itself", "interrupt", "gather", "group", "exception group", "thread", "forgotten"])
@on_real_clock
async def test_an_agent_that_exits_has_failed_alone(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent_that_exits.py").write_text(AGENT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "agent_that_exits", raising=False)
    harness = FunctionHarness("agent_that_exits:agent", {"how": how})
    async with harness_loop(harness) as loop:
        policy = Policy(lambda text, request: "Yes.")
        bad, good = await episodes_of(loop, [episode_task(0), episode_task(1)], policy.generate)
    assert good.result == RewardResult(reward=1.0) and bad.result is not None
    if how == "forgotten":
        assert bad.result == RewardResult(reward=0.5)
    else:
        expected = {"interrupt": "KeyboardInterrupt", "exception group": "of anyio", "group": "TaskGroup"}
        assert expected.get(how, "SystemExit") in (bad.result.error or "")
    assert len(bad.sequences) == 1


def test_tasks_of_others_exit_as_ever_and_cancelling_reaches_a_contained_one() -> None:
    async def leaves() -> None:
        sys.exit(4)

    async def main() -> None:
        with exits_contained():
            waiting = asyncio.create_task(asyncio.sleep(60), name="a name")
            new = asyncio.create_task(asyncio.sleep(60))
        await asyncio.sleep(0)
        assert waiting.get_name() == "a name" and "sleep" in repr(waiting)
        for task in (waiting, new, asyncio.create_task(asyncio.sleep(60))):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        failing: Any = asyncio.create_task(leaves())
        await failing

    with pytest.raises(SystemExit):
        asyncio.run(main())
