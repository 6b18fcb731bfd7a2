"""An error in a form that every process can read, whatever its class is."""

import pickle
import traceback
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Packed:
    """One error of a chain of causes."""

    name: str
    text: str
    notes: tuple[str, ...]
    pickled: bytes
    """The pickled error, empty where it cannot be pickled."""

    @classmethod
    def of(cls, error: BaseException) -> "_Packed":
        try:
            pickled = pickle.dumps(error)
        except Exception:
            pickled = b""
        return cls(type(error).__qualname__, _text(error), tuple(vars(error).get("__notes__", ())), pickled)

    def unpacked(self) -> BaseException:
        """Return the error, or a RuntimeError with its name and text: pickle calls a constructor of several arguments
        with the wrong ones (errors of HTTP clients have such), and the module of a user's class may be missing here."""
        try:
            error = pickle.loads(self.pickled)
        except Exception:
            error = None
        if not isinstance(error, BaseException) or (type(error).__qualname__, _text(error)) != (self.name, self.text):
            error = RuntimeError(f"{self.name}: {self.text}")
        if self.notes:
            error.__notes__ = list(self.notes)
        return error


class CarriedError(Exception):
    """An error on its way to another process, with its causes and notes, which pickle and Ray alone lose.

    Example: `CarriedError.of(error)` is raised in an actor, and `as_raised` raises the error in the driver.
    """

    def __init__(self, chain: tuple[_Packed, ...], trace: str):
        """Carry an error.

        Args:
            chain: the error, its `__cause__`, the cause of that.
            trace: the traceback, as text.
        """
        super().__init__(chain, trace)
        self.chain = chain
        self.trace = trace

    @classmethod
    def of(cls, error: BaseException) -> "CarriedError":
        chain: list[BaseException] = []
        cause: BaseException | None = error
        while cause is not None and cause not in chain:
            chain.append(cause)
            cause = cause.__cause__
        return cls(tuple(map(_Packed.of, chain)), "".join(traceback.format_exception(error)))

    def unpacked(self, where: str) -> BaseException:
        """Return the error as it was raised, with the traceback as one more note."""
        first, *causes = (packed.unpacked() for packed in self.chain)
        last = first
        for cause in causes:
            last.__cause__, last = cause, cause
        first.add_note(f"on {where}:\n{self.trace}")
        return first

    def __str__(self) -> str:
        return f"{self.chain[0].name}: {self.chain[0].text}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be read)"
