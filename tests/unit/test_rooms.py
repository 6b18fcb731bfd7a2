"""The rooms of each package and who may import whom: no arrow between rooms runs up, so there is no circle either.

A room is a folder, or a file at the top of its package. `ORDER` lists them from the ground up.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

ORDER = {
    "rollout": [
        *("errors", "request_ids", "events", "actors", "failures"),
        *("types", "staleness", "curriculum", "prompts", "mixture", "progress", "sampled_tokens", "buffer"),
        *("chat", "rewards", "engines", "replica", "router", "http", "fleet"),
        *("agents", "sessions", "environments", "data", "teacher", "evaluation"),
        *("rollouter", "snapshot"),
    ],
    "trainer": [
        *("learning_rate", "metrics", "ports", "prefix_tree", "tokens", "tiny"),
        *("batch", "advantages", "tracking", "checkpoint", "mini_batches", "old_logprobs", "losses"),
        *("replica_gap", "batch_check", "worker", "supervised", "step", "loop"),
    ],
    "scripts": [
        *("command", "launch", "plan", "api"),
        *("observe", "simulate", "predict", "replay", "dashboard", "bench", "migrate"),
    ],
}
WINGS = {"observe", "dashboard", "predict", "replay", "simulate", "bench", "migrate"}
"""The folders of `scripts` that look at runs or try things out. Nothing else may need them."""
ABOVE_COMMANDS = {"api": {"train", "sft", "evaluate", "serve"}}
"""The folders of `scripts` that run commands, and which."""
COMMANDS_OF_WINGS = {"audit", "rehearse", "timeline", "plot_curve", "wandb_view", "fleet"}


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[1] if len(parts) > 2 else path.stem


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports anywhere, except for annotations only (under `if TYPE_CHECKING`)."""
    stack: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        stack.extend(ast.iter_child_nodes(node))


def arrows(package: str) -> Iterator[tuple[str, str, str]]:
    """Each import of one room by another: (the importing room, the imported one, the line)."""
    for path in files(package):
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == package and len(parts) > 1 and parts[1] != room_of(path):
                yield room_of(path), parts[1], f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("package", ORDER)
def test_no_arrow_between_rooms_runs_up(package: str) -> None:
    order = ORDER[package]
    wrong = {
        line
        for room, below, line in arrows(package)
        if room in order and below not in ABOVE_COMMANDS.get(room, ())
        if below not in order or order.index(below) >= order.index(room)
    }
    assert wrong == set()


@pytest.mark.parametrize("package", ORDER)
def test_every_room_has_its_floor(package: str) -> None:
    commands = {path.stem for path in (ROOT / package).glob("*.py")} if package == "scripts" else set()
    assert {room_of(path) for path in files(package)} - {"__init__", *commands} == set(ORDER[package])


def test_the_core_never_imports_a_wing() -> None:
    """Nor a command that needs one: commands are imported by no folder."""
    wings = WINGS | COMMANDS_OF_WINGS
    assert [line for room, below, line in arrows("scripts") if below in wings and room not in wings] == []
    commands = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert [line for room, below, line in arrows("scripts") if below in commands and room in ORDER["scripts"][:3]] == []
