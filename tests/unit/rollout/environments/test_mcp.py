"""Tools of real MCP servers, over their standard input and output and over streamable HTTP. What becomes of processes
and connections is shown with a server by hand, which starts at once."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from rollout.agents.loop import load_agent_loop
from rollout.agents.multi_turn import MultiTurn
from rollout.chat.messages import ToolCall
from rollout.environments.mcp import Connection, McpTools, Server, agent_loop
from tests.support.environments import TOKENIZER, call, episode_of, error_of, heard, play
from tests.support.paths import ROOT
from tests.support.real_clock import on_real_clock
from tests.support.searches import free_port

COMMAND = [sys.executable, "-m", "tests.support.mcp_server"]
SMALL = [sys.executable, str(ROOT / "tests/support/small_mcp_server.py")]
NAMES = ["power", "note", "fail", "wait", "parts", "variable", "crash"]


def start(port: int) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([*COMMAND, f"{port}"], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as connection:
            if connection.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(0.05)
    raise TimeoutError("the MCP server does not listen")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    process = start(port)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


def loop_of(server: dict[str, Any], **args: Any) -> MultiTurn:
    return agent_loop(TOKENIZER, server=server, **args)


@pytest.fixture(scope="module", params=["stdio", "http"])
def loop(request: pytest.FixtureRequest, url: str) -> MultiTurn:
    server = {"command": COMMAND} if request.param == "stdio" else {"url": url}
    return loop_of(server, max_output_chars=60, call_timeout_s=10.0)


def servers() -> list[psutil.Process]:
    mine = psutil.Process().children(recursive=True)
    living = [process for process in mine if process.status() != psutil.STATUS_ZOMBIE]
    return [process for process in living if process.cmdline()[-1:] in (COMMAND[-1:], SMALL[-1:])]


# -- episodes ----------------------------------------------------------------------------------------------------------


def test_tools_are_known_before_there_are_episodes(loop: MultiTurn, url: str) -> None:
    tools = loop.prompt_tools
    assert [tool.name for tool in tools] == NAMES
    assert tools[0].description == "Raise a number to a power."
    assert tools[0].parameters["required"] == ["base"]
    assert [tool.name for tool in loop_of({"url": url}, tools=["wait", "power"]).prompt_tools] == ["wait", "power"]


def test_an_episode(loop: MultiTurn) -> None:
    lines = [
        call("power", base=3) + call("parts"),
        call("fail", reason="no disk") + call("square", base=3) + "\n" + call("power", base=10, exponent=80),
        "It is 9.",
    ]
    episode = play(loop, lines)
    said = heard(episode)
    assert "<tool_response>\n9\n</tool_response>" in said and "one\n[image that cannot be shown]\ntwo" in said
    assert "Error: Error executing tool fail: no disk" in said and "Error: no tool is named 'square'" in said
    assert "[cut: 60 of 81 characters]" in said
    assert episode.result is None, "rollout.reward scores it"
    assert (episode.metrics["tool_calls"], episode.metrics["tool_errors"]) == (5, 2)
    assert episode.metrics["cut_tool_results"] == 2 and episode.metrics["failed_closes"] == 0


@on_real_clock
async def test_each_episode_has_a_process_of_its_own_which_ends_with_it() -> None:
    loop = loop_of({"command": SMALL, "env": {"COLOUR": "red"}})
    lines = [call("note", text="a") + call("note", text="b"), call("variable", name="COLOUR"), "done"]
    for episode in await asyncio.gather(episode_of(loop, lines), episode_of(loop, lines)):
        assert "a\n" in heard(episode) and "a b\n" in heard(episode) and "a b a" not in heard(episode)
        assert "red" in heard(episode) and episode.metrics["failed_closes"] == 0
    assert servers() == []


@on_real_clock
async def test_a_shared_connection_is_one_for_all_episodes() -> None:
    loop = loop_of({"command": SMALL}, shared=True)
    lines = [call("note", text="a"), "done"]
    episodes = await asyncio.gather(*(episode_of(loop, lines) for _ in range(3)))
    assert len(servers()) == 1
    await loop.close()
    assert servers() == [], "it ends with the run"
    assert sorted(heard(episode).count("a a a") for episode in episodes) == [0, 0, 1]


def test_a_call_has_a_deadline(url: str) -> None:
    loop = loop_of({"url": url}, call_timeout_s=0.5)
    episode = play(loop, [call("wait", seconds=2), call("power", base=4), "done"])
    assert "Error: the tool wait took longer than call_timeout_s=0.5" in heard(episode)
    assert "16" in heard(episode), "the connection holds"


@pytest.mark.parametrize("arguments", ['{"base": ', "[1]", '{"base": "x"}', '{"base": 1e400}', "3", "[" * 100_000])
@on_real_clock
async def test_wrong_arguments_are_answered(url: str, arguments: str) -> None:
    connection = Connection(Server(url=url))
    specs = await connection.open()
    await connection.close()
    tools = McpTools(Server(url=url), specs, 5.0, 100)
    await tools.open()
    result = await tools.result(ToolCall(call_id="call_0", name="power", arguments=arguments))
    await tools.close()
    assert result.is_error and result.text.startswith("Error: ")


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_a_server_that_is_lost_is_not_a_reward_of_0(shared: bool) -> None:
    loop = loop_of({"command": SMALL}, shared=shared)

    async def two() -> list[Any]:
        return [await episode_of(loop, [line, "done"]) for line in (call("crash"), call("note", text="here"))]

    lost, later = asyncio.run(two())
    assert error_of(lost).startswith("ConnectionError: the MCP server ")
    assert later.result is None and "here" in heard(later), "the next one has a new connection"
    assert servers() == []


def test_a_server_that_restarts_is_found_again() -> None:
    port = free_port()
    process = start(port)
    loop = loop_of({"url": f"http://127.0.0.1:{port}/mcp"}, shared=True)
    lines = [call("power", base=3), "done"]

    async def three() -> list[Any]:
        nonlocal process
        first = await episode_of(loop, lines)
        process.kill()
        process.wait()
        second = await episode_of(loop, lines)
        process = start(port)
        return [first, second, await episode_of(loop, lines), await episode_of(loop, lines)]

    try:
        first, second, *later = asyncio.run(three())
    finally:
        process.kill()
        process.wait()
    assert first.result is None
    assert error_of(second).startswith("ConnectionError: the MCP server http://")
    assert later[-1].result is None


@pytest.mark.slow
@on_real_clock
async def test_an_episode_that_is_cancelled_leaves_no_process() -> None:
    loop = loop_of({"command": SMALL})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await episode_of(loop, [call("wait", seconds=20), "done"])
    assert servers() == []


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ({"server": {}}, "agent_args.server={}: needs either command or url"),
        ({"server": {"uri": "x"}}, "agent_args.server.uri: must be one of command, env, url, token_env"),
        ({"server": {"command": "python my.py"}}, "command=python my.py: must be a list of texts"),
        (
            {"server": {"command": ["no-such-program"]}},
            "agent_args.server: the MCP server no-such-program: FileNotFound",
        ),
        ({"server": {"command": ["false"]}}, "agent_args.server: the MCP server false: MCPError: Connection closed"),
        ({"server": {"url": "http://127.0.0.1:9/mcp"}}, "the MCP server http://127.0.0.1:9/mcp: ConnectError"),
        ({"server": {"url": "http://x/", "token_env": "NO_SUCH"}}, "token_env=NO_SUCH: there is no such environment"),
        (
            {"server": {"command": SMALL}, "tools": ["add"]},
            r"agent_args.tools=\['add'\]: there is no add; the server",
        ),
        ({"server": {"command": SMALL}, "call_timeout_s": 99}, "=99: must be a number above 0, and below step_t"),
        ({"server": {"command": SMALL}, "call_timeout_s": 0}, "call_timeout_s=0: must be a number above 0, and below"),
        ({"server": {"command": SMALL}, "max_output_chars": "all"}, "max_output_chars=all: must be a whole number"),
    ],
)
def test_what_is_wrong_is_said_before_there_are_episodes(args: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        load_agent_loop("rollout.environments.mcp:agent_loop", TOKENIZER, args)


def test_a_server_that_does_not_answer_has_a_deadline() -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match="agent_args.server: connecting with the MCP server sleep 20 took longer than"):
        loop_of({"command": ["sleep", "20"]}, step_timeout_s=0.5, call_timeout_s=0.2)
    assert time.monotonic() - began < 10
    assert not [process for process in psutil.Process().children() if process.name() == "sleep"]
