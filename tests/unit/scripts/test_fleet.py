"""The command `scripts.fleet` against the socket of a run: what it tells, what it refuses, and where the socket is."""

import asyncio
import json
import re
import stat
import threading
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from configs.checkpoint import FLEET_SOCKET
from rollout.events.driver import DriverEvents, reporting
from rollout.events.kinds import FleetEvent, FleetEventKind
from rollout.fleet.app import fleet_app
from rollout.http.server import linked_socket, served
from scripts import fleet
from scripts.command.run_folder import LOCK_FILE, Holder
from tests.support.fakes import settle
from tests.support.fleets import OperatedFleet
from tests.support.happenings import make_writer
from trainer.tracking.events.kinds import UpdateStarted
from trainer.tracking.events.lines import EVENTS_FILE

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

        with linked_socket(run_dir / FLEET_SOCKET) as listener:
            async with served(fleet_app(setup.operator), listener):
                await test(setup, call)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(main())


def test_status_add_drain_and_remove(tmp_path: Path) -> None:
    async def test(setup: OperatedFleet, call: Call) -> None:
        node = setup.replicas["replica-0"].node
        width = max(4, len(node))
        assert await call("add", "2") == "starting replica-2, replica-3; status tells when they serve"
        assert await call("remove", "replica-2") == "replica-2 is removed"
        await setup.router.acquire(1)
        assert await call("drain", "replica-0") == "replica-0 drains"
        assert await call("status") == (
            f"name       state     version  running  tokens/s  {'node':{width}}  why\n"
            f"replica-0  DRAINING  7        0        0.0       {node:{width}}  ends when its requests have\n"
            f"replica-1  READY     7        0        0.0       {node:{width}}  -\n"
            f"replica-2  DEAD      -1       0        0.0       {'-':{width}}  removed by the operator\n"
            f"replica-3  STARTING  -1       0        0.0       {'-':{width}}  -"
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
        assert len(setup.fleet.replicas) == 2

    served_fleet(tmp_path, test, min_replicas=2)


def test_the_socket_is_its_owners_alone_found_through_any_path_and_gone_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    link = folder / FLEET_SOCKET
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
    (tmp_path / FLEET_SOCKET).symlink_to("/nowhere/socket")
    with pytest.raises(SystemExit, match="^fleet error: the run does not answer, so it has ended"):
        fleet.main(["--run", str(tmp_path), "status"])


def test_a_run_on_another_machine_is_named_with_it_and_its_history_is_told_here(tmp_path: Path) -> None:
    holder = replace(Holder.this_process(), host="node-17")
    (tmp_path / LOCK_FILE).write_text(json.dumps(asdict(holder)))
    (tmp_path / FLEET_SOCKET).symlink_to("/nowhere/socket")
    expected = f"^fleet error: --run {tmp_path}: it runs on node-17, or was killed there: call this there; "
    with pytest.raises(SystemExit, match=expected):
        fleet.main(["--run", str(tmp_path), "status"])
    (tmp_path / EVENTS_FILE).touch()
    assert fleet.run(fleet._parse(["--run", str(tmp_path), "status", "--history"])).startswith("time (UTC)")


def test_a_run_that_ends_before_it_answers_is_told(tmp_path: Path) -> None:
    with linked_socket(tmp_path / FLEET_SOCKET) as listener:
        answering = threading.Thread(target=lambda: listener.accept()[0].close())
        answering.start()
        with pytest.raises(SystemExit, match="^fleet error: the run ended before it had answered: "):
            fleet.main(["--run", str(tmp_path), "status"])
        answering.join()


def test_the_history_is_told_also_after_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line that was cut off costs no other."""
    shown: list[str] = []

    def happens(event: FleetEvent) -> None:
        with make_writer(tmp_path) as writer:
            events = DriverEvents(writer.put)
            events.emit(UpdateStarted(global_steps=1))
            reporting(events, shown.append)(event)

    happens(FleetEvent(FleetEventKind.GIVEN_UP, "replica-0", "replica-0 is given up: out of memory"))
    with (tmp_path / EVENTS_FILE).open("a") as file:
        file.write('{"kind":"fle')
    happens(FleetEvent(FleetEventKind.PAUSED, None, "paused (keep) by alice"))
    with (tmp_path / EVENTS_FILE).open("ab") as file:
        file.write(b'{"kind":"\xc3\n')
    assert shown == ["replica-0 is given up: out of memory", "paused (keep) by alice"]
    fleet.main(["--run", str(tmp_path), "status", "--history"])
    head, lost, paused, cut = capsys.readouterr().out.splitlines()
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  "
    assert head.split() == ["time", "(UTC)", "event", "what"]
    assert re.fullmatch(time + "given up  replica-0 is given up: out of memory", lost)
    assert re.fullmatch(time + r"paused    paused \(keep\) by alice", paused)
    assert cut == "2 lines of events.jsonl are cut off"
    with pytest.raises(SystemExit, match="^fleet error: --run .*none: no events.jsonl there: nothing has happened"):
        fleet.main(["--run", str(tmp_path / "none"), "status", "--history"])
