"""Errors on their way between processes. tests/system/rollout/test_errors_over_ray.py takes them over real actors."""

import asyncio
import pickle

import pytest

from rollout.actors.carried import as_raised, carries_errors
from rollout.actors.packed import CarriedError
from tests.support.errors import assert_same, error_of, examples, raise_example
from tests.support.real_clock import on_real_clock


class PaymentError(Exception):
    """An error like those of many libraries, which pickle cannot load."""

    def __init__(self, who: str, amount: int):
        super().__init__(f"{who} cannot pay {amount}")


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise TypeError("no text")


@carries_errors
async def raises(error: Exception) -> None:
    raise error


def arrived(error: Exception) -> BaseException:
    async def main() -> BaseException:
        carried = await error_of(raises(error))
        assert isinstance(carried, CarriedError)
        return await error_of(as_raised(throw(pickle.loads(pickle.dumps(carried))), "replica-3"))

    async def throw(error: BaseException) -> None:
        raise error

    return asyncio.run(main())


@pytest.mark.parametrize("name", examples())
def test_an_error_of_ours_keeps_type_text_causes_and_notes(name: str) -> None:
    @carries_errors
    def raises_here() -> None:
        raise_example(name)

    with pytest.raises(CarriedError) as carried:
        raises_here()
    assert_same(pickle.loads(pickle.dumps(carried.value)).unpacked("replica-3"), examples()[name], "replica-3")


def test_an_error_that_pickle_cannot_load_keeps_its_name_and_text() -> None:
    def local() -> None: ...

    error = PaymentError("Tom", 3)
    error.__cause__ = ValueError(local)
    error.add_note("a note")
    received = arrived(error)
    assert repr(received) == "RuntimeError('PaymentError: Tom cannot pay 3')"
    assert str(received.__cause__).startswith("ValueError: <function") and received.__notes__[0] == "a note"
    assert isinstance(arrived(UnreadableError()), UnreadableError)


@on_real_clock
async def test_what_is_no_carried_error_passes() -> None:

    async def divide() -> float:
        return 1 / 0

    async def two() -> int:
        return 2

    assert await as_raised(two(), "replica-3") == 2
    with pytest.raises(ZeroDivisionError):
        await as_raised(divide(), "replica-3")
