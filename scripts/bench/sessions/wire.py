"""What a harness of a benchmark sends and hears: chat completions over a connection of its own."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Self

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


def body(messages: Sequence[Any], **fields: Any) -> str:
    """Of a request for a chat completion."""
    return json.dumps({"model": "policy", "messages": messages, "tools": [TOOL], **fields})


def with_result(messages: list[Any], answer: dict[str, Any]) -> None:
    """Append an answer of the policy, without its reasoning, and the result of the tool that it calls."""
    calls = answer["tool_calls"]
    messages.append({"role": "assistant", "content": answer.get("content"), "tool_calls": calls})
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in calls]


class Wire:
    """One connection to a session. It costs a client less than a library does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, url: str, key: str):
        self._reader, self.writer = reader, writer
        _, _, address = url.partition("//")
        self._host, _, self._path = address.partition("/")
        self._key = key

    @classmethod
    async def open(cls, url: str, key: str) -> Self:
        """`url`: of a session on this machine."""
        host, _, port = url.partition("//")[2].partition("/")[0].rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)), url, key)

    def send(self, text: str) -> None:
        data = text.encode()
        head = f"POST /{self._path}/v1/chat/completions HTTP/1.1\r\nhost: {self._host}\r\n"
        head += f"authorization: Bearer {self._key}\r\ncontent-length: {len(data)}\r\n\r\n"
        self.writer.write(head.encode() + data)

    async def receive(self) -> tuple[int, bytes]:
        """Status and body of the next answer."""
        status, *headers = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        length = next((int(line.partition(":")[2]) for line in headers if line.startswith("content-length:")), None)
        if length is not None:
            return int(status.split()[1]), await self._reader.readexactly(length)
        parts = []
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            parts.append((await self._reader.readexactly(size + 2))[:-2])
        await self._reader.readexactly(2)
        return int(status.split()[1]), b"".join(parts)

    async def ask(self, messages: Sequence[Any], *, is_stream: bool) -> dict[str, Any]:
        """The message that answers. Raises RuntimeError for any status but 200."""
        self.send(body(messages, stream=is_stream))
        status, data = await self.receive()
        if status != 200:
            raise RuntimeError(f"status {status}: {data.decode()}")
        return _joined(data) if is_stream else json.loads(data)["choices"][0]["message"]


def _joined(stream: bytes) -> dict[str, Any]:
    """The message that the deltas of a stream add up to: every field comes whole in one of them."""
    message: dict[str, Any] = {"content": None, "tool_calls": []}
    for line in stream.decode().splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                delta = choice["delta"]
                message["content"] = delta.get("content") or message["content"]
                message["tool_calls"] += delta.get("tool_calls", [])
    return message
