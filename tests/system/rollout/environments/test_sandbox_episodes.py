"""Episodes in sandboxes: tools, hidden tests, tasks in Harbor's format, and the world of one-line programs."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.sandbox import SandboxBackend
from rollout.agents.loop import Episode
from rollout.agents.loop import end as end_shared
from rollout.data.code_world import FLAWLESS, episode, problems_of
from rollout.environments.sandbox import code_world, harbor, tools
from rollout.environments.sandbox.hidden_tests import hidden_tests
from rollout.environments.sandbox.sandbox import Limit, Sandbox, SandboxLostError
from rollout.environments.sandbox.sandboxes import provide, sandbox_config
from rollout.rewards.base import RewardResult
from tests.support.environments import TOKENIZER, call, episode_of, error_of, prompt_of, told
from tests.support.fakes import make_prompt
from tests.support.paths import ROOT
from tests.support.sandboxes import SMALL, need_sandboxes, shell
from tests.support.sequences import only

TASKS = ROOT / "rollout/environments/sandbox/tasks"


@pytest.fixture(autouse=True)
def _sandboxes() -> Iterator[None]:
    need_sandboxes()
    before = sandbox_config()
    provide(replace(SMALL, warm=1, max_running=4))
    yield
    provide(before)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def all_of_it() -> Any:
        try:
            return await work
        finally:
            await end_shared()

    return asyncio.run(all_of_it())


def played(say: Sequence[str] | Callable[[str], str], max_turns: int = 8, **extra: Any) -> Episode:
    loop = tools.agent_loop(TOKENIZER, max_turns=max_turns)
    return run(episode_of(loop, say, prompt_of(loop, **extra)))


# -- tools -------------------------------------------------------------------------------------------------------------


def test_the_tools_share_the_files_of_an_episode_and_the_policy_reads_what_they_print() -> None:
    lines = [
        call("python", code="open('x.txt', 'w').write('seven')\nprint(6 * 7)"),
        call("bash", command="cat x.txt; false"),
        call("bash", command=":(){ :|:& };:; sleep 8"),
        call("bash", command="echo still here"),
        "It is 42.",
    ]
    ended = played(lines)
    assert ended.finish_reason == "stop" and ended.result is None, "rollout.reward scores it"
    first, second, third, fourth = told(ended).split("<tool_response>")[1:]
    assert "42" in first and "seven\n[exit code 1]" in second and "still here" in fourth
    assert "[ended: had sandbox.max_processes=32 processes or more]" in third
    assert ended.metrics["tool_calls"] == 4 and ended.metrics["tool_errors"] == 0


def test_a_sandbox_that_is_lost_leaves_the_episode_without_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(sandbox: Sandbox, *_: Any, **__: Any) -> None:
        await sandbox.stop()
        raise ConnectionError("the machine is on fire")

    monkeypatch.setattr(Sandbox, "exec", lost)
    assert "the sandbox of the episode is gone" in error_of(played([call("bash", command="true")]))


# -- hidden tests ------------------------------------------------------------------------------------------------------

ADD = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\n"
LONG = "".join(f"{number}\n" for number in range(200_000))
IN_OUT = "```\nprint(sum(map(int, input().split())))\n```"


@pytest.mark.parametrize(
    ("text", "tests", "passed", "limited"),
    [
        (ADD, [{"call": "add(2, 3)", "output": "5"}, {"call": "add('a', 'b')", "output": "'ab'"}], 1.0, 0.0),
        (ADD, json.dumps([{"call": "add(2, 3)", "output": "5"}, {"call": "add(2, 3)", "output": "6"}]), 0.5, 0.0),
        (ADD, ["assert add(2, 3) == 5", {"code": "assert add(1, 1) == 2"}], 1.0, 0.0),
        (f"{ADD[:-4]}print(5)\nprint('no newline', end='')\n```", [{"call": "add(2, 3)", "output": "5"}] * 2, 1.0, 0.0),
        (ADD, ["assert add(2, 3) == 6"], 0.0, 0.0),
        ("import sys; sys.exit(0)", ["assert False"], 0.0, 0.0),
        (IN_OUT, [{"input": "2 3\n", "output": "5"}, {"input": "1 1\n", "output": "2\n"}], 1.0, 0.0),
        (IN_OUT, [{"input": "2 3\n", "output": "6"}, {"input": "1 1\n", "output": "2\n"}], 0.5, 0.0),
        ("while True: pass", [{"input": "", "output": ""}], 0.0, 1.0),
        # It ends by the kernel's limit or, if it is looked at in time, by ours.
        ("import os\nwhile True: os.fork()", [{"input": "", "output": ""}], 0.0, None),
        ("no program", [{"input": "", "output": "no program"}], 0.0, 0.0),
        ("for n in range(int(input())): print(n)", [{"input": "200000\n", "output": LONG}], 1.0, 0.0),
        ("for n in range(199999): print(n)\nprint()", [{"input": "", "output": LONG}], 0.0, 0.0),
        (
            "class Two:\n  def __repr__(self): return 'a\\n b\\x0c'\nprint('a')",
            [{"call": "Two()", "output": "a\n b\x0c"}, {"call": "print(1)", "output": "None"}],
            1.0,
            0.0,
        ),
        ("text = 'x' * 2**20", [{"call": "text", "output": repr("x" * 2**20)}] * 2, 1.0, 0.0),
        (
            "f = open('/work/big', 'wb')\nwhile f.write(bytes(1 << 20)): pass",
            [{"input": "", "output": ""}] * 2,
            0.0,
            None,
        ),
    ],
)
def test_a_program_is_worth_what_tests_say_that_it_never_sees(
    text: str, tests: Any, passed: float, limited: float | None
) -> None:
    result: RewardResult = run(hidden_tests(replace(make_prompt(0), extra={"tests": tests}), text))
    assert (result.reward, result.metrics["passed"], result.error) == (float(passed == 1), passed, None)
    assert limited is None or result.metrics["limited"] == limited


def test_what_a_program_must_write_is_nowhere_in_its_sandbox() -> None:
    look = (
        "import os\nfor folder, _, names in os.walk('/sandbox'):\n"
        "  for name in names:\n    print(open(os.path.join(folder, name)).read())"
    )
    tests = [{"input": "", "output": "the secret"}, {"call": "1", "output": "the secret"}]
    result: RewardResult = run(hidden_tests(replace(make_prompt(0), extra={"tests": tests}), look))
    assert result.metrics["passed"] == 0


# -- Harbor ------------------------------------------------------------------------------------------------------------


def task_with(folder: Path, tests: str) -> Path:
    """Return a task whose tests are these commands."""
    for name in ("environment", "tests"):
        (folder / name).mkdir()
    (folder / "instruction.md").write_text("Do it.")
    (folder / "task.toml").write_text("")
    (folder / "tests/test.sh").write_text(tests)
    return folder


def solution(name: str) -> str:
    return (TASKS / name / "solution/solve.sh").read_text()


@pytest.mark.parametrize("name", sorted(path.name for path in TASKS.iterdir()))
def test_each_task_that_ships_is_solved_by_its_solution_and_by_nothing_else(name: str) -> None:
    for command, reward in ((solution(name), 1.0), ("ls /app", 0.0)):
        ended = played([call("bash", command=command), "Done."], harbor_task=str(TASKS / name))
        assert ended.result is not None and ended.result.error is None
        assert ended.result.reward == pytest.approx(reward, abs=0.3) and ended.metrics["verified"] == 1.0


def test_the_tests_of_a_task_come_when_the_agent_has_ended_and_judge_its_files_only() -> None:
    """What it has put in their places, and what it left running, is gone by then."""
    cheat = (
        "ls -R /tests /solution /logs; cat /app/Dockerfile; rm -rf /sandbox/tests /sandbox/logs;"
        "ln -s /sandbox/work /sandbox/tests; mkdir -p /sandbox/logs/verifier;"
        "(while :; do echo 1 > /sandbox/logs/verifier/reward.txt; done) >/dev/null 2>&1 &"
    )
    ended = played([call("bash", command=cheat), "Done."], harbor_task=str(TASKS / "count_errors"))
    assert ended.result is not None and ended.result.reward == 0.0
    assert "test.sh" not in told(ended) and "solve.sh" not in told(ended)


WRITES = """cat > /app/total <<'PROGRAM'
open('/logs/verifier/reward.json', 'w').write('{"reward": 1e300, "more": 1}')
PROGRAM"""
CUSTOM = """folder=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $folder
echo "import builtins; builtins.print = lambda *_: __import__('os').write(1, b'1')" > $folder/usercustomize.py"""


@pytest.mark.parametrize("cheat", [WRITES, CUSTOM])
def test_the_program_that_is_judged_does_not_write_its_own_reward(cheat: str) -> None:
    ended = played([call("bash", command=cheat), "Done."], harbor_task=str(TASKS / "repair_total"))
    assert ended.result is not None and ended.result.reward in (0.0, 0.25)
    assert set(ended.metrics) & {"more", "verified"} == {"verified"}


@pytest.mark.parametrize(
    ("written", "reward"),
    [
        ("echo 1 > reward.txt; echo '{\"reward\": 0}' > reward.json", 1.0),
        ('echo \'{"reward": 0.5, "a b": 1, "speed": 2}\' > reward.json', 0.5),
        ("echo 1e39 > reward.txt", None),
        ("echo nan > reward.txt", None),
        ('echo "{\\"reward\\": 1$(printf \'0%.0s\' {1..400})}" > reward.json', None),
    ],
)
def test_a_reward_is_read_where_harbor_writes_it_and_is_a_number_that_a_run_can_work_with(
    written: str, reward: float | None, tmp_path: Path
) -> None:
    task = task_with(tmp_path, f"cd /logs/verifier; {written}")
    ended = played(["Done."], harbor_task=str(task))
    assert ended.result is not None and ended.result.reward == (reward or 0.0)
    assert ended.metrics["verified"] == float(reward is not None)
    assert ("speed" in ended.metrics, "a b" in ended.metrics) == ("speed" in written, False)


def test_variables_of_a_task_reach_its_agent_and_its_tests(tmp_path: Path) -> None:
    task = task_with(tmp_path, 'echo "$([ $MODE = slow ] && echo 1 || echo 0)" > /logs/verifier/reward.txt')
    (task / "environment/Dockerfile").write_text("FROM debian\nENV MODE=slow\nENV PATH=/opt/x/bin:$PATH\n")
    ended = played([call("bash", command="echo mode $MODE, path $PATH"), "Done."], harbor_task=str(task))
    assert "mode slow, path /opt/x/bin:/usr" in told(ended)
    assert ended.result is not None and ended.result.reward == 1.0


def test_what_ran_on_until_a_limit_is_no_reason_against_a_right_answer() -> None:
    bomb = "(:(){ :|:& };:) >/dev/null 2>&1; sleep 1"
    lines = iter([call("bash", command=f"{solution('count_errors')}\n(sleep 0.2; {bomb}) >/dev/null 2>&1 &"), "Done."])

    def say(text: str) -> str:
        if lines.__length_hint__() == 1:
            time.sleep(1.0)  # the limit is reached meanwhile
        return next(lines)

    ended = played(say, harbor_task=str(TASKS / "count_errors"))
    assert ended.result is not None and (ended.result.reward, ended.metrics["verified"]) == (1.0, 1.0)


def test_an_agent_that_leaves_no_room_for_the_tests_gets_nothing() -> None:
    lines = [call("bash", command="cat /dev/zero > /app/big; chmod 0 /sandbox/logs"), "Done."]
    ended = played(lines, harbor_task=str(TASKS / "count_errors"))
    assert ended.result is not None and (ended.result.reward, ended.result.error) == (0.0, None)
    assert ended.metrics["verified"] == 0.0


def test_the_last_turn_is_judged_too() -> None:
    lines = [call("bash", command=solution("count_errors"))]
    ended = played(lines, max_turns=1, harbor_task=str(TASKS / "count_errors"))
    assert ended.result is not None and ended.result.reward == 1.0


# -- one-line programs -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_program_is_run_repaired_and_judged() -> None:
    rng = random.Random(0)
    problems = problems_of("train", {"train": 4}, 0)

    async def all_of_them() -> None:
        loop = code_world.agent_loop(TOKENIZER)
        for problem in problems:
            row = problem.row()
            extra = {name: row[name] for name in ("program", "test", "tests")}
            question, run_it, report, repaired = episode(problem, rng, FLAWLESS)
            prompt = prompt_of(loop, chat=False, question=question, **extra)
            ended = await episode_of(loop, [run_it, repaired], prompt)
            assert ended.result is not None and (ended.result.reward, ended.result.error) == (1.0, None)
            read = TOKENIZER.decode(only(ended).response_ids.tolist(), skip_special_tokens=True)
            assert read == f"{run_it}{report}{repaired}" and ended.metrics["runs"] == 1.0
            guessed = await episode_of(loop, [f" {problem.broken.line}"], prompt)
            assert guessed.result is not None and guessed.result.reward == 0.0

    run(all_of_them())


# -- docker ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["docker", "podman"])
def test_containers_are_sandboxes_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a stand-in of the command: neither docker nor podman is needed."""
    command = tmp_path / name
    stand_in = (ROOT / "tests/support/docker_stand_in.py").read_text()
    command.write_text(f"#!/usr/bin/python3\n{stand_in}")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    config = replace(SMALL, backend=SandboxBackend(name), image="python:3.12-slim")

    async def inside() -> None:
        sandbox = await Sandbox.start(config)
        try:
            assert (await shell(sandbox, "echo hi > /app/x; cat /app/x")).stdout == b"hi\n"
            assert (await shell(sandbox, "sleep 60", timeout_s=1.0)).why == "took longer than 1 s"
            await sandbox.renew()
            assert (await shell(sandbox, "ls /app")).stdout == b""
            # Its filter of calls is docker's own, so its process 1 looks after itself.
            await sandbox.exec(["python3", "-c", "import resource as r; r.prlimit(1, r.RLIMIT_NOFILE, (200, 200))"])
            assert (await shell(sandbox, "echo hi")).limit is Limit.tampered
            with pytest.raises(SandboxLostError):
                await sandbox.renew()
        finally:
            await sandbox.stop()

    run(inside())
    assert "'--pids-limit', '33'" in (tmp_path / "calls").read_text()


def test_a_task_names_the_image_of_its_container() -> None:
    task = replace(harbor.read_task(TASKS / "count_errors"), docker_image="made/for:it")
    assert task.image(replace(SMALL, backend=SandboxBackend.docker)) == "made/for:it"
    with pytest.raises(harbor.TaskError, match="docker_image=made/for:it needs sandbox.image=FOLDER"):
        task.image(SMALL)
