"""Environment variables that the processes of a run have in common."""

import os
from pathlib import Path

QUIET_NCCL = {"TORCH_NCCL_DUMP_ON_TIMEOUT": os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")}
"""Unless it was asked for. With it, the first group of a process ends the process some minutes after a work of any
group of it failed (torch's ProcessGroupNCCL.cpp, HeartbeatMonitor): a weight transfer to a replica that died would end
the trainer and the replicas that live."""

REPO_ROOT = Path(__file__).resolve().parents[2]
"""Where this checkout lies."""

PYTHON_PATH = os.pathsep.join(filter(None, (str(REPO_ROOT), os.environ.get("PYTHONPATH"))))
"""PYTHONPATH of a run's processes: this checkout, and what the user's own has, such as the module of a reward."""
