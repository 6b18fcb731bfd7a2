"""Environment variables that the processes of a run have in common."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from configs.runtime.network import INTERFACES, VLLM_ADDRESS

QUIET_NCCL = {"TORCH_NCCL_DUMP_ON_TIMEOUT": os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")}
"""Switches off NCCL's watchdog dumps, unless the environment asks for them. With them, the first group of a process
ends the process some minutes after a work of any group of it failed (torch's ProcessGroupNCCL.cpp, HeartbeatMonitor): a
weight transfer to a replica that died would end the trainer and the replicas that live."""

REPO_ROOT = Path(__file__).resolve().parents[2]
"""The folder of this checkout."""

PYTHON_PATH = os.pathsep.join(filter(None, (str(REPO_ROOT), os.environ.get("PYTHONPATH"))))
"""PYTHONPATH of a run's processes: this checkout, and what the user's own has, such as the module of a reward."""


FORWARDED = ("HF_", "NCCL_", "GLOO_", "TORCH_", "VLLM_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_", "CUDA_HOME")
"""The beginnings of the names of variables that the processes of a run have from the shell of its command, on whatever
machine they run."""


def forwarded_environment(names: Collection[str]) -> dict[str, str]:
    """Return what the processes of a run get of the environment of this one, on a cluster that runs already: Ray alone
    would give them that of the shell of `ray start`. `names`: ray.forward_env."""
    return {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(FORWARDED) or name in names) and name != VLLM_ADDRESS
    }


def take_environment(forwarded: Mapping[str, str], own: Collection[str]) -> None:
    """Set the forwarded variables in this process, over what it has of its machine.

    Args:
        own: variables that a process of this kind sets itself, and which stay. The network interfaces that the shell
            of `ray start` names stay, too: they are of this machine.
    """
    for name, value in forwarded.items():
        if name not in own and not (name in INTERFACES and name in os.environ):
            os.environ[name] = value


def user_environment() -> dict[str, str]:
    """Return the environment of this process without this checkout on PYTHONPATH, for programs of the user: their
    modules may have the names of ours, such as `trainer` and `scripts`."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = os.pathsep.join(entry for entry in entries if entry not in ("", str(REPO_ROOT)))
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**inherited, "PYTHONPATH": others} if others else inherited
