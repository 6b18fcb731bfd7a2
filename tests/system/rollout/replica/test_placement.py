"""A replica's actor that dies before it runs, as one does that Ray places on a node that is gone already."""

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError

from configs.schema import Config
from rollout.actors.supervisor import PLACEMENTS
from rollout.replica.replica_group import ReplicaHandle
from tests.support.actors import NoAgents, make_starter

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


def die(folder: Path, times: int) -> None:
    """The process of an actor, before it has answered anything: the first `times` of those that call this."""
    deaths = len(list(folder.iterdir()))
    if deaths < times:
        (folder / str(deaths)).touch()
        os._exit(1)


def refuse(folder: Path) -> None:
    (folder / str(len(list(folder.iterdir())))).touch()
    raise OSError("the log's folder is full")


def start(prepare: Callable[[], None], told: list[str]) -> ReplicaHandle:
    agents = NoAgents()

    async def scenario() -> ReplicaHandle:
        async with asyncio.timeout(60):
            replica = await make_starter(Config(), lambda name: prepare, agents, told).start("replica-7")
        assert agents.connected == ["replica-7"]
        assert (await replica.status()).name == "replica-7"
        replica.kill()
        return replica

    return asyncio.run(scenario())


def test_it_is_placed_again_under_the_same_name(tmp_path: Path) -> None:
    told: list[str] = []
    replica = start(partial(die, tmp_path, PLACEMENTS - 1), told)
    assert [text.split(":")[0] for text in told[:-1]] == ["replica-7 is placed again"] * (PLACEMENTS - 1)
    assert told[-1] == f"replica-7 starts on {replica.node}"


def test_one_that_dies_wherever_it_is_placed_is_lost(tmp_path: Path) -> None:
    with pytest.raises(ActorDiedError):
        start(partial(die, tmp_path, 100), [])
    assert len(list(tmp_path.iterdir())) == PLACEMENTS


def test_what_fails_by_itself_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(ActorDiedError, match="the log's folder is full"):
        start(partial(refuse, tmp_path), [])
    assert len(list(tmp_path.iterdir())) == 1
