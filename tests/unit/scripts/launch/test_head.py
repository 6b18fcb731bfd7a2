"""The watch over the head of a Ray cluster, on a clock that does not tick by itself."""

import asyncio
import socket

import pytest

from scripts.launch import head
from scripts.launch.head import HeadLostError, watched
from tests.support.fakes import now


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """Return the times between which the head does not answer, to be filled in."""
    times: list[tuple[float, float]] = []

    async def answers(address: str) -> bool:
        is_silent = any(begin <= now() < end for begin, end in times)
        await asyncio.sleep(head.LOOK_S if is_silent else 0)
        return not is_silent

    monkeypatch.setattr(head, "answers", answers)
    return times


@pytest.mark.parametrize(
    ("saves", "told"),
    [
        ("well", "40 s: a checkpoint was saved meanwhile"),
        ("badly", "40 s, and a checkpoint could not be saved meanwhile"),
        ("never", "40 s, in which no step ended to be saved"),
        (None, r"40 s \(RAY_gcs_rpc_server_reconnect_timeout_s"),
    ],
)
async def test_a_head_that_stays_silent_ends_the_run_when_it_has_had_time_to_save(
    silence: list[tuple[float, float]], saves: str | None, told: str
) -> None:
    silence.append((100, 1000))
    asked: list[float] = []

    async def save() -> bool:
        asked.append(now())
        await asyncio.sleep(1e6 if saves == "never" else 5)
        return saves == "well"

    with pytest.RaisesGroup(pytest.RaisesExc(HeadLostError, match=f"10.77.0.1:6379.* {told}")):
        async with watched("10.77.0.1:6379") as its:
            its.save = None if saves is None else save
            await asyncio.sleep(1e6)
    assert (
        its.is_lost
        and 138 <= now() <= 146
        and len(asked) == (saves is not None)
        and all(118 <= at <= 126 for at in asked)
    )


async def test_a_head_that_comes_back_ends_nothing(silence: list[tuple[float, float]]) -> None:
    silence += [(100, 130), (200, 230)]
    asked: list[float] = []

    async def save() -> bool:
        asked.append(now())
        return True

    async with watched("10.77.0.1:6379") as its:
        its.save = save
        await asyncio.sleep(300)
    assert not its.is_lost and len(asked) == 2, "each time a checkpoint is saved, in case it does not"


def test_the_head_is_there_while_its_port_can_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        assert asyncio.run(head.answers(f"{host}:{port}"))
    assert not asyncio.run(head.answers(f"{host}:{port}"))
