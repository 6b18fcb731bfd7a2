"""Agents of a user's own, which talk to the policy over the HTTP of their session."""

import asyncio
import os
from pathlib import Path
from typing import Any


async def asks_twice(task: Any, client: Any) -> float:
    """Returns the parity of what it was told. As long as the file $SLOW_REWARDS is there, it thinks for four seconds
    before it asks again, so that a test decides when a run speeds up."""
    messages, told = [{"role": "user", "content": task.prompt}], ""
    for turn in range(2):
        if turn and Path(os.environ["SLOW_REWARDS"]).exists():
            await asyncio.sleep(4)
        answer = await client.chat.completions.create(model="any", messages=messages, max_tokens=12)
        text = answer.choices[0].message.content or ""
        told += text
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "More?"}]
    return float(len(told) % 2)
