"""scripts/fleet.py against the socket of a run: what it tells, what it refuses, and where the socket is."""

import asyncio
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rollout.fleet.app import fleet_app
from rollout.http.server import linked_socket, served
from scripts import fleet
from tests.support.fakes import settle
from tests.support.fleets import OperatedFleet

Call = Callable[..., Awaitable[str]]


def served_fleet(run_dir: Path, test: Callable[[OperatedFleet, Call], Awaitable[None]], min_replicas: int = 1) -> None:
    """Two replicas on version 7, and the script in a thread, on real time."""

    async def main() -> None:
        setup = OperatedFleet(min_replicas)
        await setup.manager.update_weights(7)
        running = asyncio.create_task(setup.operator.run())
        await settle()

        async def call(*arguments: str) -> str:
            options = fleet._parse(["--run", str(run_dir), *arguments])
            return await asyncio.to_thread(fleet.run, options)

        with linked_socket(run_dir / fleet.SOCKET_FILE) as listener:
            async with served(fleet_app(setup.operator), listener):
                await test(setup, call)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(main())


def test_status_add_drain_and_remove(tmp_path: Path) -> None:
    async def test(setup: OperatedFleet, call: Call) -> None:
        node = setup.replicas["replica-0"].node
        assert await call("add", "2") == "starting replica-2, replica-3; status tells when they serve"
        assert await call("remove", "replica-2") == "replica-2 is removed"
        await setup.router.acquire(1)
        assert await call("drain", "replica-0") == "replica-0 drains"
        assert await call("status") == (
            "name       state     version  running  tokens/s  node\n"
            f"replica-0  DRAINING  7        0        0.0       {node}\n"
            f"replica-1  READY     7        0        0.0       {node}\n"
            "replica-3  STARTING  -1       0        0.0       -"
        )

    served_fleet(tmp_path, test)


def test_what_is_refused_is_told_with_what_is_allowed(tmp_path: Path) -> None:
    async def test(setup: OperatedFleet, call: Call) -> None:
        for command, reason in {
            "drain replica-7": "replica-7: there is no such replica; there are replica-0, replica-1",
            "remove replica-0": "replica-0 cannot go: 1 replicas would be left, rollout.min_replicas=2",
            "add 0": "count=0: Input should be greater than or equal to 1",
            "add 2000": "count=2000: Input should be less than or equal to 1024",
        }.items():
            with pytest.raises(fleet.FleetError) as refused:
                await call(*command.split())
            assert str(refused.value) == reason
        assert len(setup.fleet.lives) == 2

    served_fleet(tmp_path, test, min_replicas=2)


def test_the_socket_is_its_owners_alone_found_through_any_path_and_gone_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    link = folder / fleet.SOCKET_FILE
    link.symlink_to("/nowhere")  # of a run that was killed
    paths: list[Path] = []

    async def test(setup: OperatedFleet, call: Call) -> None:
        paths.append(link.resolve())
        assert stat.S_IMODE(paths[0].stat().st_mode) == 0o600
        assert stat.S_IMODE(paths[0].parent.stat().st_mode) == 0o700
        assert len(str(link)) > 108 and (await call("status")).startswith("name")

    served_fleet(folder, test)
    assert not link.is_symlink() and not paths[0].parent.exists()


def test_without_a_run_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=rf"^fleet error: --run {tmp_path}: no fleet.sock there: the run has ended"):
        fleet.main(["--run", str(tmp_path), "status"])
    (tmp_path / fleet.SOCKET_FILE).symlink_to("/nowhere/socket")
    with pytest.raises(SystemExit, match="^fleet error: the run does not answer, so it has ended"):
        fleet.main(["--run", str(tmp_path), "status"])
