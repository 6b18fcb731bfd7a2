"""Plain tools and environments with rollout.tools_run_in=process: what a policy has them do stops no agent worker."""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import psutil
import pytest

from configs.rollout import RolloutConfig, ToolPlace
from configs.schema import Config
from rollout.actors.resident import UnloadableError
from rollout.agents.environment import Step
from rollout.agents.loop import Episode
from rollout.agents.multi_turn import MultiTurn
from rollout.agents.tool_processes import make_processes, processes_here, tools_in
from rollout.agents.tools import Tool, Toolbox, ToolResult
from rollout.agents.worker import AgentWorker
from rollout.chat.messages import ToolCall
from rollout.progress import Attempt
from rollout.types import Completion, GenerationRequest, SamplingParams
from tests.support import plain_tools as plain
from tests.support.characters import EOS, Characters
from tests.support.episodes import error_of, make_task
from tests.support.fakes import make_completion, make_prompt
from tests.support.harnesses import ClientHarness, Policy, run_one
from tests.support.rollouts import group_of
from tests.support.sequences import only
from tests.support.stand_ins import NO_REWARD, NoTokenizer

T = TypeVar("T")
IN_PROCESSES = RolloutConfig(tools_run_in=ToolPlace.process, tool_processes=2)
FUNCTIONS: list[Callable[..., Any]] = [
    *(plain.power, plain.where, plain.refuse, plain.unsayable, plain.leave, plain.stop_politely, plain.repeat),
    *(plain.fork, plain.here, plain.later, plain.run_loop, plain.start_child),
]
TOOLS = Toolbox(FUNCTIONS, call_timeout_s=2.0, max_output_chars=100)


def in_processes(scenario: Callable[[], Awaitable[T]], rollout: RolloutConfig = IN_PROCESSES) -> T:
    async def run() -> T:
        with tools_in(make_processes(rollout)):
            return await scenario()

    value = asyncio.run(run())
    assert_all_end()
    return value


def children() -> list[psutil.Process]:
    """Return the processes of tools and environments that live."""
    living: list[psutil.Process] = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE and "spawn_main" in str(child.cmdline()):
                living.append(child)
    return living


def assert_all_end() -> None:
    """Give processes that were killed the time to end."""
    deadline = time.monotonic() + 10
    while children() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert children() == []


async def call(name: str, **arguments: Any) -> ToolResult:
    return await TOOLS.result(ToolCall(call_id="call_0", name=name, arguments=json.dumps(arguments)))


async def longest_stop(work: Awaitable[T]) -> tuple[T, float]:
    """Return what the work returns, and for how long the event loop stood still meanwhile."""
    stops = [0.0]

    async def watch() -> None:
        while True:
            begin = time.monotonic()
            await asyncio.sleep(0.01)
            stops.append(time.monotonic() - begin)

    watching = asyncio.create_task(watch())
    try:
        return await work, max(stops)
    finally:
        watching.cancel()


@pytest.mark.slow
def test_a_tool_that_holds_the_gil_stops_nothing_and_its_process_is_replaced() -> None:
    """9 ** 10**8 takes an hour, in which no thread of its process runs."""

    async def scenario() -> None:
        first = await call("where")
        result, stop = await longest_stop(call("power", base=9, exponent=10**8))
        text = "Error: TimeoutError: the tool power took longer than call_timeout_s=2.0; its process was killed"
        assert (result.text, result.is_error) == (text, True)
        assert stop < 1.5, f"the event loop stood still for {stop:.1f} s"
        assert (await call("power", base=9)).text == "81"
        assert (await call("where")).text not in (first.text, str(os.getpid()))

    in_processes(scenario)


def test_what_a_policy_reads_is_as_in_a_thread() -> None:
    """Results, errors of the tool and of its arguments, JSON, cuts, awaitables; only the process is another."""
    calls: list[tuple[str, dict[str, Any]]] = [
        *(("power", {"base": 9}), ("power", {}), ("power", {"base": 2, "exponent": -1}), ("refuse", {"reason": "x"})),
        *(("unsayable", {}), ("stop_politely", {}), ("repeat", {"text": "ab", "times": 90}), ("no_tool", {})),
    ]

    async def results() -> list[ToolResult]:
        return [await call(name, **arguments) for name, arguments in calls]

    there = in_processes(results)
    assert there == asyncio.run(results())
    assert [result.text for result in there[:3]] == [
        "81",
        "Error: the arguments of power are wrong: base: Field required",
        "0.5",
    ]

    async def places() -> list[ToolResult]:
        return [await call(name) for name in ("where", "later", "run_loop", "fork", "where", "here")]

    where, later, run_loop, fork, again, here = (result.text for result in in_processes(places))
    assert where == later == run_loop == again != here == str(os.getpid())
    assert fork == "false"


@pytest.mark.parametrize("code", [0, 3])
def test_a_tool_that_ends_its_process_is_an_error_that_the_policy_reads(code: int) -> None:
    async def scenario() -> list[ToolResult]:
        return list(await asyncio.gather(call("leave", code=code), call("power", base=3)))

    left, power = in_processes(scenario)
    assert left.text == f"Error: LostProcessError: the tool leave ended its process: exit code {code}"
    assert (left.is_error, power.text) == (True, "9")


@pytest.mark.slow
def test_what_a_tool_has_started_ends_with_its_process(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    result = in_processes(lambda: call("start_child", file=str(file)))
    assert result.text.startswith("Error: TimeoutError: the tool start_child took longer than call_timeout_s=2.0; its")
    child = psutil.Process(int(file.read_text()))
    psutil.wait_procs([child], timeout=20)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_processes_are_used_again_and_there_are_no_more_than_the_key_says() -> None:
    async def scenario() -> tuple[set[str], int]:
        results = [await asyncio.gather(*(call("where") for _ in range(6))) for _ in range(2)]
        return {result.text for some in results for result in some}, len(children())

    where, living = in_processes(scenario)
    assert len(where) == living == 2


def test_a_call_that_is_cancelled_ends_its_process() -> None:
    async def scenario() -> None:
        await call("where")
        task = asyncio.create_task(call("power", base=9, exponent=10**8))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while children():
            await asyncio.sleep(0.01)
        assert (await call("power", base=9)).text == "81"

    in_processes(scenario)


# -- tools that a process cannot find ----------------------------------------------------------------------------------


def in_a_closure() -> Callable[[], int]:
    def closure() -> int:
        return 1

    return closure


class Holder:
    def held(self) -> int:
        return 1


def hidden() -> int:
    return 1


REAL_HIDDEN = hidden
hidden = plain.where  # as a decorator leaves it that does not keep the function under its name


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (in_a_closure(), r"Can't pickle local object .in_a_closure.<locals>.closure"),
        (Holder().held, "it is a method of an object, Holder, which each process would have a copy of"),
        (REAL_HIDDEN, r"Can't pickle <function hidden at \w+>: it's not the same object as"),
    ],
)
def test_a_tool_that_cannot_be_found_by_name_is_refused_with_the_reason(
    function: Callable[..., Any], reason: str
) -> None:
    made_before = Toolbox([function])
    with tools_in(make_processes(IN_PROCESSES)):
        key = r"^rollout.tools_run_in=process: the tool \w+ is not found by its name in another process: "
        with pytest.raises(ValueError, match=key + reason):
            Toolbox([function])
        with pytest.raises(ValueError, match=r"or set rollout.tools_run_in=thread"):
            made_before.specs()
        with pytest.raises(ValueError, match=reason):
            asyncio.run(made_before.result(ToolCall(call_id="call_0", name=function.__name__, arguments="{}")))
    assert Toolbox([function]).specs() == made_before.specs(), "threads take any function"


def test_a_tool_that_was_changed_by_hand_is_refused() -> None:
    tool = Tool.of(plain.power)
    with tools_in(make_processes(IN_PROCESSES)), pytest.raises(ValueError, match="the tool power is not as its func"):
        Toolbox([replace(tool, spec=replace(tool.spec, description="Something else."))])


def test_a_tool_whose_module_cannot_be_imported_there_fails_the_episode_and_not_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy must not read of it, which could do nothing about it."""
    (tmp_path / "only_here.py").write_text(
        f"import os\nif os.getpid() != {os.getpid()}:\n    raise OSError('no such device')\n"
        "def tool() -> int:\n    return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import only_here  # pyright: ignore[reportMissingImports]

    toolbox = Toolbox([only_here.tool])

    async def scenario() -> None:
        why = "the tool tool cannot be loaded in a process of its own: OSError: no such device"
        with pytest.raises(UnloadableError, match=why):
            await toolbox.result(ToolCall(call_id="call_0", name="tool", arguments="{}"))

    in_processes(scenario)


# -- environments ------------------------------------------------------------------------------------------------------


class Says:
    """A policy that says these texts, and any more turns "go"."""

    def __init__(self, *texts: str):
        self._texts = iter(texts)
        self.read: list[str] = []

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        self.read += ["".join(map(chr, request.prompt_ids)) for request in requests]
        return [self._say(next(self._texts, "go")) for _ in requests]

    def _say(self, text: str) -> Completion:
        token_ids = [*map(ord, text), EOS]
        return make_completion(token_ids, [3] * len(token_ids), "stop")


async def play(kind: Any, policy: Says, ordinal: int = 17, closed: Path | None = None, **options: Any) -> Episode:
    prompt = replace(make_prompt(ordinal), extra={} if closed is None else {"closed": str(closed)})
    loop = MultiTurn(kind, Characters(), max_turns=5, **options)
    return await loop.run_episode(make_task(0, prompt, max_tokens=500), policy.generate)


def said(episode: Episode) -> str:
    return "".join(map(chr, only(episode).response_ids)).replace("\0", "|")


@pytest.mark.parametrize("kind", [plain.Counter, plain.MixedCounter])
def test_an_environment_stays_in_one_process_which_ends_with_the_episode(kind: Any, tmp_path: Path) -> None:
    async def scenario() -> list[Episode]:
        episodes = await asyncio.gather(*(play(kind, Says(), ordinal, tmp_path / str(ordinal)) for ordinal in range(3)))
        assert_all_end()
        return list(episodes)

    pids = set[str]()
    for ordinal, episode in enumerate(in_processes(scenario)):
        pid = said(episode).partition("\n")[0].partition(" ")[2]
        pids.add(pid)
        assert said(episode) == f"{ordinal} {pid}\ngo|1 {pid}\ngo|2 {pid}\ngo|"
        assert episode.result is not None and (episode.result.reward, episode.result.error) == (1.5, None)
        assert (tmp_path / str(ordinal)).read_text() == f"3 {pid}", "it is closed there"
        assert episode.metrics["failed_closes"] == 0
    assert len(pids) == 3 and str(os.getpid()) not in pids


@pytest.mark.parametrize(
    ("turn", "error"),
    [
        ("hang", "TimeoutError: a step of the environment took longer than step_timeout_s=1.0; its process was killed"),
        ("end", "LostProcessError: a step of the environment ended its process: exit code 3"),
        ("raise", "KeyError: 'no such turn'"),
    ],
)
def test_an_episode_whose_environment_is_lost_or_raises_has_failed_and_says_so(
    turn: str, error: str, tmp_path: Path
) -> None:
    async def scenario() -> list[Episode]:
        failing = play(plain.Counter, Says("go", turn), 1, tmp_path / "closed", step_timeout_s=1.0)
        episodes, stop = await longest_stop(asyncio.gather(failing, play(plain.Counter, Says(), 2)))
        assert stop < 0.9
        return list(episodes)

    failed, other = in_processes(scenario)
    assert error_of(failed) == error
    assert (failed.finish_reason, failed.metrics["turns"], failed.metrics["failed_closes"]) == ("stop", 2, 0)
    assert (tmp_path / "closed").exists() == (turn == "raise"), "what has ended cannot be closed"
    assert other.result is not None and other.result.reward == 1.5


def test_an_episode_that_is_cancelled_in_a_step_closes_its_environment_after_the_step(tmp_path: Path) -> None:
    async def scenario() -> None:
        policy = Says("wait")
        running = asyncio.create_task(play(plain.Counter, policy, closed=tmp_path / "closed"))
        while not policy.read:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (tmp_path / "closed").read_text().startswith("1 ")

    in_processes(scenario)


def test_an_async_environment_stays_in_the_agent_worker_whatever_it_holds() -> None:
    lock = SimpleNamespace(of=(held for held in ()))  # nobody could pickle it

    class Holds(plain.AsyncCounter):
        held = lock

    episode = in_processes(lambda: play(lambda prompt: Holds(), Says()))
    assert episode.result is not None and episode.result.reward == 1


def test_an_environment_that_cannot_be_sent_fails_its_episode_with_the_key_and_the_way_out() -> None:
    class Local(plain.Counter):
        pass

    episode = in_processes(lambda: play(Local, Says()))
    assert error_of(episode).startswith(
        "ValueError: rollout.tools_run_in=process: the environment Local cannot be sent to a process: "
    )
    assert error_of(episode).endswith(
        "Make what it holds in its reset, make its methods async, or set rollout.tools_run_in=thread"
    )


@pytest.mark.slow
def test_episodes_wait_for_a_process_and_their_deadlines_do_not_begin() -> None:
    """Three episodes share one process, one after another; each takes longer than a step may."""
    rollout = replace(IN_PROCESSES, tool_processes=1)

    async def scenario() -> list[Episode]:
        return await asyncio.gather(
            *(play(plain.Counter, Says("wait", "wait"), number, step_timeout_s=0.9) for number in range(3))
        )

    episodes = in_processes(scenario, rollout)
    assert [episode.result and episode.result.reward for episode in episodes] == [1.5] * 3


# -- by key ------------------------------------------------------------------------------------------------------------


class TellsWhere:
    async def step(self, turn: Any, /) -> Step:
        result = await TOOLS.result(ToolCall(call_id="call_0", name="where", arguments="{}"))
        return Step(done=True, reward=float(result.text))


@pytest.mark.parametrize("place", ToolPlace)
def test_an_agent_worker_runs_tools_where_the_key_says(place: ToolPlace) -> None:
    async def scenario() -> float:
        worker = AgentWorker(
            config=Config(rollout=RolloutConfig(tools_run_in=place)),
            tokenizer=NoTokenizer(),
            loop=MultiTurn(lambda prompt: TellsWhere(), Characters(), max_turns=1),
            scorer=NO_REWARD,
            replicas={"r0": Says().generate},
        )
        sampling = SamplingParams(max_tokens=40, ignore_eos=True)
        group = await group_of(worker.run_group(make_prompt(17), "r0", sampling, 1, Attempt()))
        await worker.close()
        assert_all_end()
        return group.trajectories[0].reward

    assert (asyncio.run(scenario()) == os.getpid()) == (place is ToolPlace.thread)


def test_the_tools_of_a_harness_run_there_too() -> None:
    async def agent(task: Any, client: Any) -> float:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task.prompt}])
        return float((await call("where")).text)

    async def scenario() -> Episode:
        return await run_one(ClientHarness(agent), Policy(lambda text, request: "42"))

    episode = in_processes(scenario)
    assert episode.result is not None and episode.result.reward not in (0.0, float(os.getpid()))


def test_idle_processes_of_tools_make_room_for_environments() -> None:
    async def scenario() -> None:
        processes = processes_here()
        assert processes is not None
        await asyncio.gather(*(call("power", base=2) for _ in range(2)))
        assert len(children()) == 2
        placed = [await processes.place(plain.Counter(make_prompt(17))) for _ in range(2)]
        deadline = time.monotonic() + 10
        while len(children()) > 2 and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert len(children()) == 2, "rollout.tool_processes"
        for process in placed:
            processes.leave(process)
        assert (await call("power", base=3)).text == "9"

    in_processes(scenario)
