"""Rewards for system tests, by dotted path. They run in an agent worker's process."""

import itertools

from rollout.types import Prompt

calls = itertools.count(1)


def length_parity(_prompt: Prompt, text: str) -> float:
    """Has variance within a group whatever the model says, so that every step has a gradient."""
    return float(len(text) % 2)


def raises_after_200(_prompt: Prompt, text: str) -> float:
    if next(calls) > 200:
        raise ValueError("this reward was made to fail")
    return float(len(text) % 2)
