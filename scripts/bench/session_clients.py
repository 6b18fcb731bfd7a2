"""The clients of the benchmark of sessions: chat completions over a connection of their own, in a process of their own.

    python -m scripts.bench.session_clients TURNS TOOL_S

Every line of standard input is a session: {"number": 3, "url": ..., "key": ...}. Every second one talks in streams.
Each has a line of output when it has ended: its number.
"""

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from typing import Any

import httpx

from scripts.observe.tables import write_line

RESULT = "The calculator says that 17 * 3 + 4 is 55, and that the weather in Paris is sunny."
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
FIRST_MESSAGES: list[Any] = [
    {"role": "system", "content": "You answer questions, and call a calculator for every step."},
    {"role": "user", "content": "How many pens do 17 children with three pens each have, if four more are bought?"},
]


def append_turn(messages: list[Any], answer: dict[str, Any]) -> None:
    """Append an answer of the policy, without its reasoning, and the result of the tool that it calls."""
    calls = answer["tool_calls"]
    messages.append({"role": "assistant", "content": answer.get("content"), "tool_calls": calls})
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in calls]


async def ask(
    http: httpx.AsyncClient, url: str, key: str, messages: Sequence[Any], *, is_stream: bool
) -> dict[str, Any]:
    """Return the message that answers."""
    answer = await http.post(
        f"{url}/v1/chat/completions",
        headers={"authorization": f"Bearer {key}"},
        json={"model": "policy", "messages": messages, "tools": [TOOL], "stream": is_stream},
    )
    answer.raise_for_status()
    return _joined(answer.text) if is_stream else answer.json()["choices"][0]["message"]


def _joined(stream: str) -> dict[str, Any]:
    """Return the message that the deltas of a stream add up to: every field comes whole in one of them."""
    message: dict[str, Any] = {"content": None, "tool_calls": []}
    for line in stream.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                delta = choice["delta"]
                message["content"] = delta.get("content") or message["content"]
                message["tool_calls"] += delta.get("tool_calls", [])
    return message


async def talk(line: str, turns: int, tool_s: float) -> None:
    """Run a session. A call of the tool takes up to `tool_s`, so that sessions are not in step."""
    task = json.loads(line)
    number, pauses, messages = task["number"], random.Random(task["number"]), list(FIRST_MESSAGES)
    async with open_client() as http:
        for _ in range(turns):
            await asyncio.sleep(pauses.random() * tool_s)
            answer = await ask(http, task["url"], task["key"], messages, is_stream=number % 2 == 1)
            append_turn(messages, answer)
    write_line(str(number))


def open_client() -> httpx.AsyncClient:
    """Open a client of a session on this machine, which waits for answers without end."""
    return httpx.AsyncClient(verify=False, timeout=None, trust_env=False)  # certificates take time to load


async def main(turns: int, tool_s: float) -> None:
    """Run sessions until the end of standard input and of all of them."""
    async with asyncio.TaskGroup() as group:
        while line := await asyncio.to_thread(sys.stdin.readline):
            group.create_task(talk(line, turns, tool_s))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
