"""How a session samples that serves nobody's training: as its harness asks, request by request."""

from collections.abc import Mapping
from dataclasses import replace

from rollout.sessions.dialects.fields import shown
from rollout.sessions.errors import BadRequestError
from rollout.types import SamplingParams

NEUTRAL = {"min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
"""What replicas do not sample by, each with the value that changes nothing."""


def asked_sampling(default: SamplingParams, asked: Mapping[str, float]) -> SamplingParams:
    """`default` with what a request asks for. Raises BadRequestError for what cannot be sampled by.

    Example: asked_sampling(SamplingParams(top_p=0.9), {"temperature": 0.0}).top_p == 0.9
    """
    for name, neutral in NEUTRAL.items():
        if (value := asked.get(name, neutral)) != neutral:
            raise _refusal(name, value, f"{neutral:g}: sessions sample by temperature, top_p, top_k and seed")
    temperature, top_p = asked.get("temperature", default.temperature), asked.get("top_p", default.top_p)
    if temperature < 0:
        raise _refusal("temperature", temperature, "a number from 0 (greedy) on")
    if not 0 < top_p <= 1:
        raise _refusal("top_p", top_p, "a number above 0 and up to 1")
    top_k = _whole(asked, "top_k", default.top_k, "-1 (the whole vocabulary) or an integer from 1 on")
    if top_k == 0 or top_k < -1:
        raise _refusal("top_k", top_k, "-1 (the whole vocabulary) or an integer from 1 on")
    seed = default.seed if "seed" not in asked else _whole(asked, "seed", 0, "an integer")
    return replace(default, temperature=float(temperature), top_p=float(top_p), top_k=top_k, seed=seed)


def _whole(asked: Mapping[str, float], name: str, default: int, allowed: str) -> int:
    value = asked.get(name, default)
    if value != int(value):
        raise _refusal(name, value, allowed)
    return int(value)


def _refusal(name: str, value: float, allowed: str) -> BadRequestError:
    return BadRequestError(f"{name} = {shown(value)}: allowed is {allowed}", param=name)
