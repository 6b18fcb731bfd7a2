"""Tells which of the two forms of the package verifiers is installed: before 0.4, or since then."""

import importlib.util
import re
from importlib.metadata import PackageNotFoundError, version

from rollout.environments.verifiers import OLDEST, V1

IS_THERE = importlib.util.find_spec("verifiers") is not None
try:
    _VERSION = tuple(map(int, re.findall(r"\d+", version("verifiers"))[:3]))
except PackageNotFoundError:
    _VERSION = (0, 0, 0)
HAS_V1 = IS_THERE and _VERSION >= V1
HAS_LEGACY = IS_THERE and OLDEST <= _VERSION < V1
