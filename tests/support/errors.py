"""One error of every class of ours, as an actor raises it: with a cause and a note."""

import importlib
import re
from collections.abc import Awaitable, Callable
from functools import cache

from rollout.actors.packed import CarriedError
from rollout.engines.base import EngineDiedError
from rollout.errors import FleetPauseError
from tests.support.paths import ROOT

PACKAGES = ("configs", "rollout", "trainer", "weight_sync")
SPECIAL: dict[str, Callable[[], BaseException]] = {
    EngineDiedError.__name__: lambda: EngineDiedError("the engine died", None),
    FleetPauseError.__name__: lambda: FleetPauseError("pause(keep)", {"replica-1": TimeoutError("late")}),
}
"""Those whose constructor takes more than a text."""


def examples() -> dict[str, BaseException]:
    """One of every class in our packages and of some others, by name."""
    found: dict[str, BaseException] = {
        name: SPECIAL[name]() if name in SPECIAL else vars(importlib.import_module(module))[name](f"a bad {name}")
        for module, name in error_classes()
    }
    found |= {one.__name__: one(f"a bad {one.__name__}") for one in (TimeoutError, ValueError)}
    found["OSError"] = OSError(28, "No space left on device", "/runs/x")
    for name, error in found.items():
        error.add_note(f"a note on {name}")
        error.__cause__ = KeyError(f"what {name} is from")
        error.__cause__.__cause__ = ZeroDivisionError("and that")
    return found


@cache
def error_classes() -> list[tuple[str, str]]:
    """(module, name) of each. Some modules load heavy libraries, so only those are imported that have one."""
    return [
        (".".join(path.relative_to(ROOT).with_suffix("").parts), name)
        for path in sorted(one for package in PACKAGES for one in (ROOT / package).rglob("*.py"))
        for name in re.findall(r"^class (\w+Error)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
        if name != CarriedError.__name__
    ]


def raise_example(name: str) -> None:
    raise examples()[name]


async def error_of(call: Awaitable[object]) -> Exception:
    try:
        await call
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


def assert_same(found: BaseException, raised: BaseException, where: str) -> None:
    """Type, text and causes are the raised one's; of the notes one more says where it was raised."""
    assert (type(found), str(found), repr(found)) == (type(raised), str(raised), repr(raised))
    *notes, trace = found.__notes__
    assert notes == raised.__notes__
    assert trace.startswith(f"on {where}:\n") and "raise_example" in trace
    one, other = found, raised
    while other.__cause__ is not None:
        assert one.__cause__ is not None
        one, other = one.__cause__, other.__cause__
        assert (type(one), str(one)) == (type(other), str(other))
    assert one.__cause__ is None
