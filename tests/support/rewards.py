"""Rewards for system tests, by dotted path. They run in an agent worker's process."""

import asyncio
import itertools
import os
from pathlib import Path

from rollout.types import Prompt

calls = itertools.count(1)


def length_parity(_prompt: Prompt, text: str) -> float:
    """Has variance within a group whatever the model says, so that every step has a gradient."""
    return float(len(text) % 2)


def raises_after_200(_prompt: Prompt, text: str) -> float:
    if next(calls) > 200:
        raise ValueError("this reward was made to fail")
    return float(len(text) % 2)


async def a_second(_prompt: Prompt, text: str) -> float:
    """So that no step of a run that is on policy takes less."""
    await asyncio.sleep(1)
    return float(len(text) % 2)


async def slow_while_a_file_exists(_prompt: Prompt, text: str) -> float:
    """Takes four seconds as long as the file $SLOW_REWARDS is there, so that a test decides when a run speeds up."""
    if Path(os.environ["SLOW_REWARDS"]).exists():
        await asyncio.sleep(4)
    return float(len(text) % 2)
