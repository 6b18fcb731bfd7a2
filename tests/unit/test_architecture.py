"""The rules of the house: who may import whom, which library lives where, and how large a room may be."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import get_type_hints

import pytest
from omegaconf import OmegaConf

from configs.schema import Config
from tests.support.paths import ROOT

PACKAGES = ("configs", "rollout", "scripts", "trainer", "weight_sync")
SOURCES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py"))

MAY_IMPORT = {
    "configs": set(),
    "weight_sync": {"configs"},
    "rollout": {"configs", "weight_sync"},
    "trainer": {"configs", "rollout", "weight_sync"},
    "scripts": {"configs", "rollout", "trainer", "weight_sync"},
}
LIVES_IN = {
    "ray": (
        *("rollout/actors/*", "rollout/*_group.py", "rollout/replica/client.py", "trainer/worker/*_group.py"),
        *("scripts/launch/*", "scripts/command/*", "scripts/plan/*", "scripts/bench/*"),
    ),
    "vllm": ("rollout/engines/vllm/*", "weight_sync/receiver/*", "weight_sync/transports/vllm_native.py"),
    "wandb": ("trainer/tracking/wandb/*",),
    "wandb_workspaces": ("trainer/tracking/wandb/*",),
    "tensorboard": ("trainer/tracking/tensorboard_sink.py",),
    "torch": (
        *(
            "trainer/losses/*",
            "trainer/tiny/*",
            "trainer/worker/*",
            "weight_sync/receiver/*",
            "weight_sync/transports/*",
        ),
        *("scripts/bench/*", "scripts/plan/rehearsal/*", "scripts/export_hf.py", "scripts/launch/models.py"),
        "scripts/replay/worker.py",
    ),
    "transformers": (
        *("trainer/tiny/*", "trainer/worker/*", "scripts/bench/*", "scripts/plan/rehearsal/*"),
        *("rollout/agents/worker_group.py", "rollout/engines/vllm/openai_app.py"),
        "weight_sync/receiver/file_names.py",
    ),
}
HEAVY = set(LIVES_IN)
NOT_PURE = {
    "trainer/worker/attention",
    *("rollout/engines/vllm", "weight_sync/receiver", "weight_sync/transports"),
    *("trainer/losses", "trainer/tiny", "trainer/worker"),
}
"""The folders that may load heavy libraries; besides them the files that put classes into Ray, `*_group.py`."""
WITH_RAY = {
    "rollout/actors/supervisor.py",
    "rollout/actors/carried.py",
    "rollout/actors/place.py",
    "rollout/replica/client.py",
}
PURE = [
    path
    for path in SOURCES
    if path.parts[0] != "scripts"
    and str(path.parent) not in NOT_PURE
    and not path.match("*_group.py")
    and str(path) not in WITH_RAY
]


def is_below(path: Path, pattern: str) -> bool:
    return fnmatch(str(path), pattern)


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts)


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(parse(path)))


@cache
def imports(path: Path, *, at_import_only: bool = False) -> list[str]:
    return list(imports_below(parse(path), at_import_only))


def imports_below(tree: ast.AST, at_import_only: bool) -> Iterator[str]:
    """Full names of what is imported: `from a import b` gives "a.b". Never what is under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "no relative imports"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        elif not (at_import_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            yield from imports_below(node, at_import_only)


def top(name: str) -> str:
    return name.partition(".")[0]


# -- who may import whom -----------------------------------------------------------------------------------------------


def test_packages_import_only_those_below_them() -> None:
    """The allowed imports form no cycle: each package may import only packages that are listed before it."""
    order = list(MAY_IMPORT)
    assert sorted(order) == sorted(PACKAGES)
    assert all(order.index(below) < order.index(package) for package in order for below in MAY_IMPORT[package])
    wrong = [
        f"{path} imports {name}"
        for path in SOURCES
        for name in imports(path)
        if top(name) in {*PACKAGES, "tests"} - {path.parts[0]} - MAY_IMPORT[path.parts[0]]
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("package", "below", "border"),
    [
        (
            "trainer",
            "rollout",
            {
                *(
                    "rollout.actors.carried",
                    "rollout.actors.place",
                    "rollout.events.event",
                    "rollout.events.kinds",
                    "rollout.types",
                ),
                *("rollout.chat.end_tokens", "rollout.chat.generation_config"),
            },
        ),
        ("trainer", "weight_sync", {"weight_sync.adapter", "weight_sync.protocol"}),
        ("rollout", "weight_sync", {"weight_sync.protocol"}),
    ],
)
def test_a_package_takes_only_the_types_at_the_border_of_another(package: str, below: str, border: set[str]) -> None:
    """`weight_sync.adapter` is how both sides merge; `rollout.actors.carried` is how errors leave an actor;
    `rollout.chat.*` is which tokens end a turn, which checkpoints name."""
    taken = {name for path in SOURCES if path.parts[0] == package for name in imports(path)}
    assert {name.rpartition(".")[0] for name in taken if top(name) == below} == border


def test_modules_import_one_another_without_a_cycle() -> None:
    names = {module_name(path) for path in SOURCES}
    graph = {
        module_name(path): {
            known
            for name in imports(path, at_import_only=True)
            for known in (name, name.rpartition(".")[0])
            if known in names and known != module_name(path)
        }
        for path in SOURCES
    }
    while leaves := {name for name, below in graph.items() if not below & set(graph)}:
        for name in leaves:
            del graph[name]
    assert graph == {}


def test_a_main_module_is_imported_by_no_other() -> None:
    """It would be there twice in the process that runs it, under two names, with two copies of its classes."""
    assert [str(path) for path in [*SOURCES, *TESTS] if any("__main__" in name for name in imports(path))] == []


def test_no_test_file_imports_another() -> None:
    """What two of them need is in tests/support; one that is imported runs, or breaks, with the other."""
    files = {module_name(path) for path in TESTS if path.name.startswith("test_")}
    wrong = [
        f"{path} imports {name}" for path in TESTS for name in imports(path) if {name, name.rpartition(".")[0]} & files
    ]
    assert wrong == []


@pytest.mark.parametrize("library", LIVES_IN)
def test_a_heavy_library_is_used_only_where_it_lives(library: str) -> None:
    wrong = [
        str(path)
        for path in SOURCES
        if any(top(name) == library for name in imports(path))
        and not any(is_below(path, pattern) for pattern in LIVES_IN[library])
    ]
    assert wrong == []


def printed(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pure_modules_import_nothing_heavy() -> None:
    """Neither themselves nor through others."""
    modules = [module_name(path) for path in PURE]
    known = {"rollout.replica.replica", "trainer.loop", "weight_sync.checkpoint_manager"}
    assert known <= set(modules)
    assert printed(f"import sys, {', '.join(modules)}; print(*{HEAVY} & set(sys.modules))") == "\n"


@pytest.mark.parametrize("module", ["rollout.agents.worker_group", "rollout.replica.replica_group"])
def test_processes_that_serve_nothing_load_neither_web_server_nor_fleet(module: str) -> None:
    """Ray loads the module of an actor's class in the actor's process."""
    heavy = {"fastapi", "starlette", "uvicorn", "rollout.fleet"}
    assert printed(f"import sys, {module}; print(*{heavy} & set(sys.modules))") == "\n"


def test_the_driver_reads_manifests_without_torch() -> None:
    """It unpickles them on their way from the trainer to the replicas."""
    code = "import sys, weight_sync.transports.locations as its; print('torch' in sys.modules, *map(str, vars(its)))"
    without_torch, *names = printed(code).split()
    assert without_torch == "False" and {"SharedFile", "GpuMemory", "Meeting", "Changes"} <= set(names)


def test_every_package_is_the_one_of_this_checkout() -> None:
    """Their names are generic: another distribution's `scripts` must not win."""
    code = f"import sys, {', '.join(PACKAGES)}; [print(sys.modules[p].__file__) for p in {PACKAGES}]"
    assert printed(code).split() == [str(ROOT / package / "__init__.py") for package in PACKAGES]


# -- rooms -------------------------------------------------------------------------------------------------------------


def test_a_file_has_at_most_800_lines() -> None:
    lengths = {str(path): len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in [*SOURCES, *TESTS]}
    assert {path: length for path, length in lengths.items() if length > 800} == {}


def test_a_function_has_at_most_80_lines() -> None:
    too_long = [
        f"{path}:{node.lineno} {node.name}"
        for path in [*SOURCES, *TESTS]
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - min([node.lineno, *(d.lineno for d in node.decorator_list)]) >= 80
    ]
    assert too_long == []


def test_init_files_are_empty_and_every_folder_has_one() -> None:
    for folder in {ROOT / path.parent for path in SOURCES}:
        assert (folder / "__init__.py").read_text() == "", folder


def calls(name: str) -> list[tuple[Path, ast.Call]]:
    return [
        (path, node)
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


def test_nothing_is_printed() -> None:
    assert [f"{path}:{node.lineno}" for path, node in calls("print")] == []


@pytest.mark.parametrize("name", ["getattr", "hasattr", "setattr"])
def test_attributes_are_written_out(name: str) -> None:
    """`getattr` with a literal name hides a typo from everyone, pyright included. `getattr(x, "close", None)` is how an
    optional method of a user's class is looked up."""
    wrong = [
        f"{path}:{node.lineno}"
        for path, node in calls(name)
        if isinstance(node.args[1], ast.Constant) and not is_optional_method(node)
    ]
    assert wrong == []


def is_optional_method(call: ast.Call) -> bool:
    return len(call.args) == 3 and isinstance(call.args[2], ast.Constant) and call.args[2].value is None


# -- config ------------------------------------------------------------------------------------------------------------


def reads(path: Path) -> Iterator[tuple[str, str]]:
    """("rollout", "top_p") for `config.rollout.top_p`, `rollout.top_p`, `x.top_p` after `x = config.rollout`, and
    `x.top_p` and `self._x.top_p` in a file with an argument or a field `x: RolloutConfig`.

    The checkpoint manager, which has one section only, passes the names of its deadlines to `_within` as strings.
    """
    section_of = {get_type_hints(Config)[field.name].__name__: field.name for field in fields(Config)}
    sections = {
        node.arg if isinstance(node, ast.arg) else ast.unparse(node.target): section_of[node.annotation.id]
        for node in nodes(path)
        if isinstance(node, ast.arg | ast.AnnAssign)
        if isinstance(node.annotation, ast.Name) and node.annotation.id in section_of
    }
    for node in nodes(path):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple)
        ):
            pairs = list(zip(node.targets[0].elts, node.value.elts, strict=False))
        elif isinstance(node, ast.Assign):
            pairs = [(node.targets[0], node.value)]
        else:
            continue
        for target, value in pairs:
            if isinstance(target, ast.Name) and isinstance(value, ast.Attribute):
                sections[target.id] = sections.get(value.attr.lstrip("_"), value.attr)
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            name = node.value.attr.lstrip("_")
            yield sections.get(name, name), node.attr
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield sections.get(node.value.id, node.value.id), node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "self._within":
            yield from ((path.parts[0], a.value) for a in node.args if isinstance(a, ast.Constant))


def test_every_config_key_is_read_somewhere() -> None:
    schema = OmegaConf.structured(Config)
    keys = {
        (section, key)
        for section in schema
        for key in (schema[section] if OmegaConf.is_dict(schema[section]) else [section])
    }
    keys = {("config" if section == key else section, key) for section, key in keys}
    assert len(keys) > 50
    assert sorted(keys - {read for path in SOURCES if path.parts[0] != "configs" for read in reads(path)}) == []


# -- words -------------------------------------------------------------------------------------------------------------

FRAGMENT = re.compile(
    r"(Of|What|Whether|With|As|Those|For|That|Who|Which|How|When|Where|Whose|Told|Also|Than|So|By|From|On|Until)\b"
)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """The docstrings of a file, those under attributes included."""
    for node in nodes(path):
        for statement in node.body if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text.strip()


def test_a_docstring_begins_with_a_verb_or_with_the_noun_that_it_explains() -> None:
    """Never with a fragment, which only its author understands."""
    found = [(path, line, text) for path in SOURCES for line, text in docstrings(path)]
    assert [f"{path}:{line} {text[:60]}" for path, line, text in found if FRAGMENT.match(text)] == []
