"""The harnesses of `load`, in a process of their own: python -m scripts.bench.sessions.clients TURNS TOOL_S

Every line of standard input is a session: {"number": 3, "url": ..., "key": ...}. Every second one talks in streams.
Each has a line of output when it has ended: {"number": 3, "seconds": [of each call]}.
"""

import asyncio
import json
import random
import sys
import time

from scripts.bench.common import write_line
from scripts.bench.sessions.wire import FIRST_MESSAGES, Wire, with_result


async def talk(line: str, turns: int, tool_s: float) -> None:
    """`tool_s`: a call of the tool takes up to so many seconds, so that sessions are not in step."""
    task = json.loads(line)
    wire = await Wire.open(task["url"], task["key"])
    pauses, messages, seconds = random.Random(task["number"]), list(FIRST_MESSAGES), list[float]()
    for _ in range(turns):
        await asyncio.sleep(pauses.random() * tool_s)
        began = time.perf_counter()
        answer = await wire.ask(messages, is_stream=task["number"] % 2 == 1)
        seconds.append(time.perf_counter() - began)
        with_result(messages, answer)
    wire.writer.close()
    write_line(json.dumps({"number": task["number"], "seconds": seconds}))


async def main(turns: int, tool_s: float) -> None:
    """Until the end of standard input and of all sessions."""
    async with asyncio.TaskGroup() as group:
        while line := await asyncio.to_thread(sys.stdin.readline):
            group.create_task(talk(line, turns, tool_s))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
