"""Rewards for tests by dotted path, which agent workers or processes of their own run, and scorers of any function."""

import asyncio
import itertools
import os
import re
import time
from pathlib import Path
from typing import Any

from configs.rewards import RewardTerm
from rollout.rewards.places import place_in_worker
from rollout.rewards.scoring import RewardScorer
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
    """Take a second, so that no step of a run that is on policy takes less."""
    await asyncio.sleep(1)
    return float(len(text) % 2)


async def slow_while_a_file_exists(_prompt: Prompt, text: str) -> float:
    """Takes four seconds as long as the file $SLOW_REWARDS is there, so that a test decides when a run speeds up."""
    if Path(os.environ["SLOW_REWARDS"]).exists():
        await asyncio.sleep(4)
    return float(len(text) % 2)


class CountsCalls:
    """A synchronous reward that knows how many calls of it ran at a time at most."""

    running = most = 0

    def __call__(self, _prompt: Prompt, text: str) -> float:
        self.running += 1
        self.most = max(self.most, self.running)
        time.sleep(0.02)
        self.running -= 1
        return 1.0


class UnprintableError(Exception):
    """An error whose text raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def hostile(_prompt: Prompt, text: str) -> Any:
    """Does what the response says, as a reward does that executes what a model wrote. Else the length is the reward."""
    if text == "hold the GIL":
        time.sleep(0.002)
        re.match(r"(a+)+$", "a" * 60 + "b")
    if text == "be slow":
        time.sleep(0.1)
    if text == "end the process":
        os._exit(3)
    if text == "end as if all were well":
        os._exit(0)
    if text == "raise the unprintable":
        raise UnprintableError
    return object() if text == "return an object" else float(len(text))


def threaded(reward: Any, timeout_s: float = 30.0) -> RewardScorer:
    """A scorer of any function, called own_reward, within this process."""
    return summed(timeout_s, own_reward=(1.0, reward))


def summed(timeout_s: float = 30.0, **terms: tuple[float, Any]) -> RewardScorer:
    """`terms`: name -> (weight, reward)."""
    return RewardScorer(
        tuple(
            (RewardTerm(name, weight), place_in_worker(reward, timeout_s)) for name, (weight, reward) in terms.items()
        )
    )
