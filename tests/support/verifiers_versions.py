"""Which of the two forms of the package verifiers is installed: before 0.4, or since then."""

import importlib.util
from importlib.metadata import PackageNotFoundError, version

IS_THERE = importlib.util.find_spec("verifiers") is not None
try:
    _VERSION = tuple(int(part) for part in version("verifiers").split(".")[:2])
except PackageNotFoundError:
    _VERSION = (0, 0)
HAS_V1 = IS_THERE and _VERSION >= (0, 4)
HAS_LEGACY = IS_THERE and not HAS_V1
