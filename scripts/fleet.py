"""Adds replicas to a running run, or takes them away.

slipstream fleet [--run FOLDER] add [N] | drain NAME | remove NAME | status [--history]   (default: runs/latest)

    add       starts N more replicas; each serves once it has the current weights
    drain     the replica gets no new work, and ends when it has finished what it has
    remove    the replica ends now; what it was generating continues on others
    status    one line per replica; --history: what happened to them and when, also after the run has ended

Call it on the machine on which the run was started; --history works on any that sees the run folder.
"""

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from configs.checkpoint import FLEET_SOCKET
from rollout.events.kinds import FleetEvent
from scripts.command.run_folder import read_holder
from scripts.observe.events import EventReader
from trainer.tracking.events.lines import EVENTS_FILE, event_files

COLUMNS = {
    "name": "name",
    "state": "state",
    "global_steps": "version",
    "running": "running",
    "tokens_per_s": "tokens/s",
    "node": "node",
    "why": "why",
}


class FleetError(RuntimeError):
    """The command was refused or did not reach the run. The message says why."""


def main(arguments: list[str] | None = None) -> None:
    try:
        sys.stdout.write(run(_parse(arguments)) + "\n")
    except FleetError as error:
        sys.exit(f"fleet error: {error}")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for the run's answer [60]")
    parser.add_argument("--run", type=Path, default=Path("runs/latest"), help="folder of the run [runs/latest]")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("add").add_argument("count", nargs="?", type=int, default=1)
    for command in ("drain", "remove"):
        commands.add_parser(command).add_argument("name", help="as status shows it, such as replica-1")
    status = commands.add_parser("status")
    status.add_argument("--history", action="store_true", help="what happened to the replicas, and when")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> str:
    """Carry out one command. Returns the text for the console. Raises FleetError."""
    if options.command == "status" and options.history:
        return history(options.run)
    holder = read_holder(options.run)
    if holder is not None and not holder.is_here:
        raise FleetError(
            f"--run {options.run}: it runs on {holder.host}, or was killed there: call this there; status --history "
            "works here"
        )
    link = options.run / FLEET_SOCKET
    if not link.is_symlink():
        raise FleetError(
            f"--run {options.run}: no {FLEET_SOCKET} there: the run has ended, or is not training yet; "
            "status --history tells what happened"
        )
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(link.resolve())), base_url="http://fleet", timeout=options.timeout
    ) as client:
        match options.command:
            case "add":
                names = _call(client, "POST", "/replicas", count=options.count)
                return f"starting {', '.join(names)}; status tells when they serve"
            case "status":
                return table(_call(client, "GET", "/replicas"))
            case command:
                _call(client, "POST", f"/replicas/{options.name}/{command}")
                return f"{options.name} {'drains' if command == 'drain' else 'is removed'}"


def history(run_dir: Path) -> str:
    """Return one line per event, with its time in UTC. Raises FleetError."""
    if not event_files(run_dir):
        raise FleetError(f"--run {run_dir}: no {EVENTS_FILE} there: nothing has happened to its replicas")
    reader = EventReader(run_dir)
    cells: list[list[str]] = []
    for stamped in reader:
        if isinstance(event := stamped.event, FleetEvent):
            when = datetime.fromtimestamp(stamped.time, UTC)
            cells.append([f"{when:%Y-%m-%d %H:%M:%S}", event.state.value, event.text])
    shown = _columns([["time (UTC)", "event", "what"], *cells])
    return shown + (f"\n{reader.num_damaged} lines of {EVENTS_FILE} are cut off" if reader.num_damaged else "")


def table(rows: list[dict[str, Any]]) -> str:
    cells = [list(COLUMNS.values())]
    cells += [["-" if row[key] is None else str(row[key]) for key in COLUMNS] for row in rows]
    return _columns(cells)


def _columns(cells: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def _call(client: httpx.Client, method: str, path: str, **query: Any) -> Any:
    try:
        answer = client.request(method, path, params=query)
    except httpx.ConnectError as error:
        raise FleetError(f"the run does not answer, so it has ended: {error}") from None
    except httpx.TimeoutException:
        raise FleetError(f"the run did not answer within --timeout={client.timeout.read:g} s") from None
    except httpx.TransportError as error:
        raise FleetError(f"the run ended before it had answered: {error}") from None
    if answer.status_code == httpx.codes.CONFLICT:
        raise FleetError(answer.json()["error"])
    if answer.status_code == httpx.codes.UNPROCESSABLE_ENTITY:
        problems = (f"{problem['loc'][-1]}={problem['input']}: {problem['msg']}" for problem in answer.json()["detail"])
        raise FleetError("; ".join(problems))
    if answer.is_error:
        raise FleetError(f"{answer.status_code}: {answer.text}")
    return answer.json()


if __name__ == "__main__":
    main()
