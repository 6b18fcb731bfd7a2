"""Commands as harnesses: what they are told, who may reward, where they run, and what is left of them."""

import asyncio
import contextlib
import json
import logging
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from configs.named_agents import NamedAgent
from configs.rollout import SessionsConfig
from configs.runtime.environment import REPO_ROOT
from configs.serve import TOKEN_ENV
from rollout.agents.loop import Episode
from rollout.rewards.base import RewardResult
from rollout.sessions.harness import CommandHarness, Connection, HarnessTask
from rollout.types import GenerationRequest
from tests.support.episodes import episodes_of, error_of
from tests.support.harnesses import Policy, episode_task, harness_loop
from tests.support.real_clock import on_real_clock

TRUTH, EXTRA = "the truth 1234567", "a hidden test 7654321"
ASK = """
import json, os, sys, urllib.error, urllib.request

def post(url, key, body):
    headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())

def ask(prompt):
    body = {"model": "any", "messages": [{"role": "user", "content": prompt}]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return post(url, os.environ["OPENAI_API_KEY"], body)[1]["choices"][0]["message"]["content"]
"""
SAYS_IT_ALL = """
ask("hi")
files = {os.path.join(at, name): open(os.path.join(at, name)).read() for at, _, names in os.walk(".") for name in names}
prompt_file = open(os.environ["SLIPSTREAM_PROMPT_FILE"]).read()
told = {"argv": sys.argv[2:], "stdin": sys.stdin.read(), "environment": dict(os.environ), "files": files}
told |= {"prompt_file": prompt_file, "cwd": os.getcwd(), "path": sys.path}
json.dump(told, open(sys.argv[1], "w"))
"""


@pytest.fixture(autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which those of episodes are made."""
    path = tmp_path_factory.mktemp("episodes")
    monkeypatch.setattr("tempfile.tempdir", str(path))
    return path


def is_42(text: str, request: GenerationRequest) -> str:
    return "It is 42."


def command(tmp_path: Path, source: str, *arguments: str) -> str:
    path = tmp_path / "agent.py"
    path.write_text(ASK + source)
    return " ".join([sys.executable, str(path), *arguments])


async def run(script: str, prompt: str = "What is 6 times 7?", say: Any = is_42, **sessions: Any) -> Episode:
    harness = CommandHarness(script, SessionsConfig(**sessions))
    task = episode_task()
    prompt_of_task = replace(task.prompt, text=prompt, ground_truth=TRUTH, extra={"tests": EXTRA})
    async with harness_loop(harness, **sessions) as loop:
        return await loop.run_episode(replace(task, prompt=prompt_of_task), Policy(say).generate)


async def told(tmp_path: Path, *arguments: str, prompt: str = "What is 6 times 7?", **sessions: Any) -> dict[str, Any]:
    """What a command is told."""
    out = tmp_path / "told.json"
    episode = await run(command(tmp_path, SAYS_IT_ALL, str(out), *arguments), prompt, **sessions)
    assert episode.result is None, "rollout.reward scores it"
    return json.loads(out.read_text())


# -- what it is told ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command_reward", [False, True])
@on_real_clock
async def test_a_command_is_told_the_prompt_and_nothing_else_of_its_row(tmp_path: Path, command_reward: bool) -> None:
    for arguments in ((), ("{prompt}",)):
        by = await told(tmp_path, *arguments, command_reward=command_reward)
        assert TRUTH not in json.dumps(by) and EXTRA not in json.dumps(by)
        assert by["prompt_file"] == "What is 6 times 7?" and by["files"] == {}
        assert (by["stdin"], by["argv"]) == (("", ["What is 6 times 7?"]) if arguments else ("What is 6 times 7?", []))


@pytest.mark.parametrize(
    "prompt",
    ['it\'s $HOME `id` "$(touch /tmp/pwned)" \\ * ;\nexit 3\n', "", " -x\t", "café 漢字", "'; exit 4; '", "{prompt}"],
)
@on_real_clock
async def test_no_text_of_a_prompt_is_read_by_the_shell(tmp_path: Path, prompt: str) -> None:
    assert (await told(tmp_path, "{prompt}", prompt=prompt))["argv"] == [prompt]
    by = await told(tmp_path, prompt=prompt)
    assert (by["stdin"], by["prompt_file"]) == (prompt, prompt)


@pytest.mark.parametrize(
    ("prompt", "why"), [("a\0b", "embedded null byte"), ("x" * 200_000, "prompts of 200,000 bytes may need stdin")]
)
@on_real_clock
async def test_a_prompt_that_can_be_no_argument_fails_its_episode_by_name(prompt: str, why: str) -> None:
    episode = await run("echo {prompt}", prompt)
    assert why in error_of(episode)


@on_real_clock
async def test_a_command_has_the_users_environment_and_neither_our_modules_nor_our_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_ENV, "secret")
    monkeypatch.setenv("OF_THE_RUN", "1")
    monkeypatch.setenv("PYTHONPATH", f"{REPO_ROOT}{os.pathsep}/mine")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/home/me/.config")
    by = await told(tmp_path)
    environment = by["environment"]
    assert (environment["OF_THE_RUN"], environment["PYTHONPATH"]) == ("1", "/mine")
    assert "secret" not in json.dumps(by)
    assert "XDG_CONFIG_HOME" not in environment and "NO_PROXY" in environment


@on_real_clock
async def test_a_named_agent_has_its_settings_in_its_home_and_its_environment(tmp_path: Path) -> None:
    out = tmp_path / "told.json"
    agent = NamedAgent(
        name="mine",
        argv=(*command(tmp_path, SAYS_IT_ALL, str(out)).split(), "{prompt}", "a b"),
        install="",
        context=0,
        files={".mine/url.txt": "$OPENAI_BASE_URL and $$1"},
        environment={"MINE": "1"},
    )
    async with harness_loop(CommandHarness(agent)) as loop:
        episode = await loop.run_episode(episode_task(), Policy(is_42).generate)
    assert episode.result is None
    by = json.loads(out.read_text())
    assert by["files"] == {"./.mine/url.txt": by["environment"]["OPENAI_BASE_URL"] + " and $1"}
    assert by["environment"]["MINE"] == "1" and by["argv"] == ["What is 6 times 7?", "a b"]
    async with harness_loop(CommandHarness(replace(agent, argv=("false",)))) as loop:
        episode = await loop.run_episode(episode_task(), Policy(is_42).generate)
    assert "rollout.agent=mine: ended with exit code 1" in error_of(episode)


# -- who rewards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["1000000", '{"reward": 1000000}', '{"value": 1}', "[" * 100_000])
@on_real_clock
async def test_nothing_that_a_command_prints_is_a_reward(tmp_path: Path, said: str) -> None:
    source = f"print(ask('hi'))\nprint({said!r}); print({said!r}, file=sys.stderr)"
    for command_reward in (False, True):
        episode = await run(command(tmp_path, source), command_reward=command_reward)
        assert episode.result is None and len(episode.sequences) == 1, "rollout.reward scores it"


REWARDS = """
answer = ask("hi")
url, key = os.environ["SLIPSTREAM_SESSION_URL"], os.environ["SLIPSTREAM_SESSION_KEY"]
mine = os.environ.get("SLIPSTREAM_REWARD_KEY", "none")
assert mine not in (key, os.environ["OPENAI_API_KEY"], os.environ["ANTHROPIC_API_KEY"])
codes = [post(url + "/reward", each, {"value": 1.0})[0] for each in (key, mine)]
codes += [post(url + "/abort", key, {})[0]]
bad = [b'{"value": NaN}', b'{"value": 1e999}', b'{"value": ' + b"9" * 400 + b"}", b"[" * 100000, b'{"value": "1"}']
for body in bad:
    codes.append(post(os.environ.get("SLIPSTREAM_REWARD_URL", url + "/reward"), mine, body)[0])
json.dump(codes, open(sys.argv[1], "w"))
"""


@pytest.mark.parametrize("may_reward", [False, True])
@on_real_clock
async def test_a_command_rewards_by_a_key_of_its_own_and_only_where_the_config_says_so(
    tmp_path: Path, may_reward: bool
) -> None:
    out = tmp_path / "codes.json"
    episode = await run(command(tmp_path, REWARDS, str(out)), command_reward=may_reward)
    assert episode.result == (RewardResult(reward=1.0) if may_reward else None) and episode.finish_reason == "stop"
    assert json.loads(out.read_text()) == [403, 200 if may_reward else 401, 403, *[400 if may_reward else 401] * 5]


@on_real_clock
async def test_the_wrapper_of_the_documentation_rewards_what_its_agent_has_left(tmp_path: Path) -> None:
    (block,) = re.findall(r"```\n(# my_wrapper.sh\n.*?)```", (REPO_ROOT / "docs" / "agents.md").read_text(), re.DOTALL)
    agent = """
assert sys.argv[1:] == ["-p", "What is 6 times 7?", "--model", "policy"] and not sys.stdin.read()
assert not [name for name in os.environ if "REWARD" in name]
open("answer.txt", "w").write(ask(sys.argv[2]))
"""
    wrapper = tmp_path / "my_wrapper.sh"
    wrapper.write_text(block.replace("claude", command(tmp_path, agent)))
    episode = await run(f"sh {wrapper}", command_reward=True)
    assert episode.result == RewardResult(reward=1.0)


TWO_HALVES = """
body = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
turn = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"], body)[1]["id"]
for reward in ({"value": 8e29}, {"value": 8e29, "turn": turn}):
    assert post(os.environ["SLIPSTREAM_REWARD_URL"], os.environ["SLIPSTREAM_REWARD_KEY"], reward)[0] == 200
"""


@on_real_clock
async def test_rewards_whose_sum_is_no_reward_are_a_failure(tmp_path: Path) -> None:
    episode = await run(command(tmp_path, TWO_HALVES), command_reward=True)
    assert "must be from -1e+30 to 1e+30, not 1.6e+30" in error_of(episode)


# -- where it runs -----------------------------------------------------------------------------------------------------

WORKS = """
ask("hi")
open("made", "w").write("x"); open(os.path.expanduser("~/.config"), "w").write("x")
os.makedirs("cache/deep"); open("cache/deep/file", "w").write("x"); os.chmod("cache/deep", 0o500); os.chmod("cache", 0)
print(os.getcwd(), os.path.expanduser("~"), sorted(os.listdir(".")), flush=True)
open(sys.argv[1], "a").write(os.getcwd() + "\\n")
sys.exit(int(sys.argv[2]))
"""


@on_real_clock
async def test_each_episode_has_a_fresh_folder_and_home_which_go_with_it(
    tmp_path: Path, folders: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "folders"
    harness = CommandHarness(command(tmp_path, WORKS, str(out), "0"), SessionsConfig())
    async with harness_loop(harness) as loop:
        for _ in range(2):
            assert (await loop.run_episode(episode_task(), Policy(is_42).generate)).result is None
    first, second = out.read_text().splitlines()
    assert first != second and Path(first).is_relative_to(folders) and str(Path.cwd()) != first
    assert list(folders.iterdir()) == [] and caplog.messages == []


@on_real_clock
async def test_folders_of_failed_episodes_are_kept_up_to_a_number_and_their_place_is_logged(
    tmp_path: Path, folders: Path, caplog: pytest.LogCaptureFixture
) -> None:
    harness = CommandHarness(command(tmp_path, WORKS, str(tmp_path / "out"), "5"), SessionsConfig(kept_folders=2))
    with caplog.at_level(logging.WARNING):
        async with harness_loop(harness) as loop:
            for _ in range(3):
                episode = await loop.run_episode(episode_task(), Policy(is_42).generate)
                assert "exit code 5" in error_of(episode)
    kept = [Path(message.rpartition(" ")[2]) for message in caplog.messages if "is kept" in message]
    assert sorted(kept) == sorted(folders.iterdir()) and len(kept) == 2
    assert (kept[0] / "home" / "made").read_text() == "x"
    assert str(kept[0] / "home") in (kept[0] / "stdout.txt").read_text()
    os.chmod(kept[0] / "home" / "cache", 0o700)
    os.chmod(kept[1] / "home" / "cache", 0o700)


@on_real_clock
async def test_a_template_is_copied_into_each_folder_and_a_folder_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "template"
    (template / ".codex").mkdir(parents=True)
    (template / ".codex" / "config.toml").write_text("model = 'policy'")
    by = await told(tmp_path, folder_template=str(template))
    assert by["files"] == {"./.codex/config.toml": "model = 'policy'"} and by["environment"]["HOME"] == by["cwd"]
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(template)
    by = await told(tmp_path, fresh_folder=False)
    assert (by["cwd"], by["environment"]["HOME"]) == (str(template), "/home/me")


@on_real_clock
async def test_nothing_is_left_of_a_folder_whose_template_cannot_be_copied(tmp_path: Path, folders: Path) -> None:
    template = tmp_path / "template"
    template.mkdir()
    os.mkfifo(template / "pipe")
    episode = await run("true", folder_template=str(template))
    assert "is a named pipe" in error_of(episode)
    assert list(folders.iterdir()) == []


@pytest.mark.parametrize("max_running", [None, 2])
@on_real_clock
async def test_no_more_commands_run_at_once_than_cores_bear(
    tmp_path: Path, max_running: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    out = tmp_path / "running"
    out.mkdir()
    source = """
ask("hi")
mine = os.path.join(sys.argv[1], str(os.getpid()))
open(mine, "w")
import time
time.sleep(0.3)
most = len([name for name in os.listdir(sys.argv[1]) if name.isdigit()])
os.remove(mine)
open(os.path.join(sys.argv[1], f"most-{most}"), "w")
"""
    harness = CommandHarness(command(tmp_path, source, str(out)), SessionsConfig())
    async with harness_loop(harness, max_running=max_running) as loop:
        tasks = [episode_task(index) for index in range(7)]
        episodes = await episodes_of(loop, tasks, Policy(is_42).generate)
    assert [episode.result for episode in episodes] == [None] * 7
    assert max(int(path.name.rpartition("-")[2]) for path in out.iterdir()) <= (max_running or 4)


# -- how it ends -------------------------------------------------------------------------------------------------------


@on_real_clock
async def test_a_command_that_fails_has_no_reward_and_says_why(tmp_path: Path) -> None:
    episode = await run(command(tmp_path, "sys.exit('no sandbox left')"))
    assert "exit code 1" in error_of(episode) and "no sandbox left" in error_of(episode)
    episode = await run("kill -SEGV $$")
    assert "was killed by SIGSEGV" in error_of(episode)


LEAVES_CHILDREN = """
import subprocess, time

def reaper():
    pid = os.getpid()
    while "reaper.py" not in open(f"/proc/{pid}/cmdline").read():
        pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    return pid

def stop(pid):
    os.kill(pid, 19)

subprocess.Popen(["sleep", "300"])
subprocess.Popen(["sleep", "301"], start_new_session=True)
subprocess.run("env -i setsid sleep 302 </dev/null >/dev/null 2>&1 &", shell=True)
subprocess.run("(env -i setsid sleep 303 &) &", shell=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve("/bin/sleep", ["sleep", "304"], {})
    os._exit(0)
time.sleep(0.3)
BEFORE
time.sleep(SECONDS)
"""


def started_in(folder: Path) -> list[str]:
    """The command lines of living processes whose working directory is below the folder, or was."""
    lines = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.readlink(f"/proc/{process.pid}/cwd").startswith(str(folder)):
                lines.append(" ".join(process.cmdline()))
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 300])
@pytest.mark.parametrize("before", ["pass", "stop(reaper())", "os.kill(os.getpid(), 9)"])
@on_real_clock
async def test_nothing_that_a_command_has_started_outlives_its_episode(
    tmp_path: Path, seconds: int, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Daemons have left its session, its tree and its environment."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("rollout.sessions.harness.END_S", 1.0)
    source = LEAVES_CHILDREN.replace("BEFORE", before).replace("SECONDS", str(seconds))
    episode = await run(command(tmp_path, source), timeout_s=2.0)
    assert error_of(episode) and started_in(tmp_path) == []


@pytest.mark.slow
@on_real_clock
async def test_nothing_is_left_of_a_command_that_is_cancelled_while_it_starts(folders: Path) -> None:
    harness, fds = CommandHarness("sleep 307"), Path("/proc/self/fd")
    num_open = 0
    for attempt in range(40):
        connection = Connection(session=f"s{attempt}", url="", server_url="", key="", agent_key="")
        running = asyncio.create_task(harness.run(HarnessTask.of(episode_task().prompt, 0), connection))
        await asyncio.sleep(attempt * 0.0005)
        running.cancel()
        await asyncio.wait([running])
        for end in connection.at_end:
            await end(False)
        num_open = num_open or len(list(fds.iterdir()))
    await asyncio.sleep(0.05)
    assert (list(folders.iterdir()), started_in(folders)) == ([], [])
    assert len(list(fds.iterdir())) <= num_open + 1


@on_real_clock
async def test_a_command_may_remove_its_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    removes = 'rm -rf "$(dirname "$SLIPSTREAM_PROMPT_FILE")"'
    script = command(tmp_path, 'ask("hi")')
    assert (await run(f"{script}; {removes}")).result is None, "it has failed in nothing"
    episode = await run(f"{removes}; exit 5")
    assert "exit code 5" in error_of(episode)
    assert "the output of a command cannot be kept" in caplog.text


@pytest.mark.slow
@on_real_clock
async def test_what_a_command_has_started_is_ended_with_the_agent_worker(tmp_path: Path) -> None:
    """The agent worker is killed, and can end nothing."""
    out = tmp_path / "ran"
    script = f"env -i setsid sleep 305 & echo > {out}; sleep 306"
    worker = f"""
import asyncio, tempfile
from rollout.sessions.harness import CommandHarness
from tests.support.episodes import episodes_of, error_of
from tests.support.harnesses import Policy, run_one
tempfile.tempdir = {str(tmp_path)!r}
asyncio.run(run_one(CommandHarness({script!r}), Policy(lambda text, request: "")))
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", worker, cwd=REPO_ROOT)
    async with asyncio.timeout(60):
        while not out.exists() or len(started_in(tmp_path)) < 3:
            await asyncio.sleep(0.05)
        process.kill()
        await process.wait()
        while started_in(tmp_path):
            await asyncio.sleep(0.05)


@on_real_clock
async def test_a_command_that_floods_its_output_does_not_hold_the_event_loop() -> None:
    gaps, running = [0.0], asyncio.create_task(run("yes & yes >&2", timeout_s=2.0))
    while not running.done():
        before = time.perf_counter()
        await asyncio.sleep(0.01)
        gaps.append(time.perf_counter() - before)
    assert max(gaps) < 0.5, "0.87 s with a line at a time"
