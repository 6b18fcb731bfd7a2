"""Check `weight_sync.transport=vllm:NAME` against what vLLM registers and against the other keys.

vLLM is read and not imported, which takes seconds. The backends of its plugins are known only once they are loaded: the
train workers look there, before they load a model.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cache

from configs.checks.problem import Problem
from configs.installed import is_installed, parsed_source
from configs.schema import Config, Device, Staging, Transport
from configs.vllm_plugins import plugin_names
from configs.weight_sync import CPU_TRANSPORTS, VLLM_BACKENDS, VLLM_PREFIX

KEY = "weight_sync.transport"
SIDES = ("WeightTransferEngineFactory", "WeightTransferTrainerFactory")
"""The classes where vLLM registers the receiving and the sending half of a backend."""


def vllm_transport_problems(config: Config) -> Iterator[Problem]:
    sync = config.weight_sync
    if sync.transport is not Transport.vllm:
        if sync.vllm_backend is not None:
            yield Problem("weight_sync.vllm_backend", f"set by {KEY}={VLLM_PREFIX}NAME, and only then")
        return
    if not sync.vllm_backend:
        yield Problem(KEY, f"must name a backend of vLLM: {_names(VLLM_BACKENDS)}", VLLM_PREFIX + "NAME")
        return
    name = VLLM_PREFIX + sync.vllm_backend
    if (reason := _refusal(sync.vllm_backend)) is not None:
        yield Problem(KEY, reason, name)
    elif sync.vllm_backend in VLLM_BACKENDS and config.device is Device.cpu:
        yield Problem(KEY, f"needs GPUs; {CPU_TRANSPORTS} work without", name)
    yield from _sharing_problems(config, name)
    if sync.staging is not Staging.none:
        yield Problem("weight_sync.staging", f"must be none with {KEY}={name}: vLLM writes into the live weights")
    if sync.delta:
        yield Problem("weight_sync.delta", f"must be false with {KEY}={name}; {VLLM_PREFIX}sparse_nccl sends changes")
    if config.model.lora.rank is not None:
        yield Problem("model.lora.rank", f"must be null with {KEY}={name}: vLLM's backends bring whole weights")
    backend = VLLM_BACKENDS.get(sync.vllm_backend)
    if backend is not None and not backend.is_verified and sync.check_every != 1:
        why = f"must be 1 with {KEY}={name}: its bytes pass no place where they could be verified, so the logprobs must"
        yield Problem("weight_sync.check_every", f"{why} be compared after every update")


def _sharing_problems(config: Config, name: str) -> Iterator[Problem]:
    """Yield what is wrong with the places of trainer and replicas."""
    backend, rollout = config.weight_sync.vllm_backend, config.rollout
    if backend == "ipc":
        most = max(rollout.num_replicas, rollout.autoscale.max_replicas or 0)
        if config.gpu_share > 1 / (1 + most):
            allowed = f"needs gpu_share of at most 1/{1 + most}: trainer and replicas must be on the same GPU"
            yield Problem(KEY, allowed, name)
    elif backend in VLLM_BACKENDS and backend != "ipc" and config.gpu_share < 1:
        allowed = f"must be cuda_ipc, shared_memory, filesystem or {VLLM_PREFIX}ipc"
        yield Problem(KEY, f"with gpu_share={config.gpu_share:g}, {allowed}", name)
    if backend == "nccl_m2n":
        for key, value in (
            ("rollout.num_replicas", rollout.num_replicas),
            ("rollout.autoscale.max_replicas", rollout.autoscale.max_replicas),
        ):
            if value is not None and value > 1:
                allowed = f"must be 1 with {KEY}={name}: vLLM lays all workers of one engine on one mesh"
                yield Problem(key, allowed)
        if not is_installed("nccl"):
            yield Problem(KEY, "needs the package nccl-extensions, which vLLM does not install", name)


def _refusal(backend: str) -> str | None:
    """Return why no run can send by this backend; None where one can, or where only a plugin of vLLM knows."""
    registered = built_in_backends()
    if registered is None:
        return None
    usable = sorted(VLLM_BACKENDS.keys() & registered[0] & registered[1])
    allowed = f"usable with the installed vLLM are {_names(usable) or 'none'}"
    if backend in registered[0] | registered[1] | VLLM_BACKENDS.keys():
        return None if backend in usable else f"vLLM's {backend} cannot be used by a run: {allowed}"
    if plugin_names():
        return None
    return f"vLLM has no such backend, and no plugin of it is installed: {allowed}"


def _names(backends: Iterable[str]) -> str:
    return ", ".join(VLLM_PREFIX + name for name in backends)


@cache
def built_in_backends() -> tuple[frozenset[str], frozenset[str]] | None:
    """Return the names of the receiving and of the sending halves that the installed vLLM registers by itself; None
    where there is no vLLM."""
    source = parsed_source("vllm", "distributed", "weight_transfer", "factory.py")
    if source is None:
        return None
    names: dict[str, set[str]] = {side: set() for side in SIDES}
    for statement in source:
        match statement:
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(side), "register_engine"), [ast.Constant(str(name)), *_])):
                names[side].add(name)
    receiving, sending = (frozenset(names[side]) for side in SIDES)
    return receiving, sending
