"""Coroutines as tests on the real clock, beside a server: other coroutines run on the virtual clock."""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

Test = Callable[..., Coroutine[Any, Any, None]]


def on_real_clock(test: Test) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**parameters: Any) -> None:
        asyncio.run(test(**parameters))

    return run


def beside(
    serve: Callable[[Callable[[Any], Awaitable[None]]], Awaitable[None]],
) -> Callable[[Test], Callable[..., None]]:
    """Return a decorator of tests whose first parameter is what `serve` calls them with. The others are pytest's."""

    def decorate(test: Test) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**parameters: Any) -> None:
            asyncio.run(serve(lambda served: test(served, **parameters)))

        signature = inspect.signature(test)
        parameters = list(signature.parameters.values())[1:]
        run.__dict__["__signature__"] = signature.replace(parameters=parameters)  # by it pytest knows the fixtures
        return run

    return decorate
