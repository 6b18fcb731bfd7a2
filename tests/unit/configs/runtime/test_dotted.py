"""A user's function by dotted path: what is found, and what is refused with the key, the value and the reason."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest

from configs.runtime.dotted import ASIDE, find

MODULE = """
import functools
NUMBER = 3
def two(prompt, text): return (prompt, text)
def swapped(text, number): ...
def any_number(*all_of_them): return len(all_of_them)
@functools.wraps(swapped)
def adapted(prompt, text): return swapped(text, prompt)
def keyword_only(prompt, *, text): ...
async def later(prompt, text=""): ...
class Loop:
    def __init__(self): ...
class Sized:
    def __init__(self, size): ...
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that was not there a moment ago."""
    name = f"own_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_broken.py").write_text("import no_such_dependency")
    (tmp_path / f"{name}_typo.py").write_text("x = 1 +")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_function_is_found_and_is_the_one_of_the_module(own: str) -> None:
    assert find("rollout.reward", f"{own}:two", ("prompt", "text"))(1, 2) == (1, 2)
    assert find("rollout.reward", f"{own}:any_number", ("prompt", "text"))(1, 2) == 2
    assert find("rollout.reward", f"{own}:adapted", ("prompt", "text")).__name__ == "swapped"
    assert find("data.loader", "os.path:join", ("a", "b"))("x", "y") == "x/y"


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is searched as for `python -m`, also for console scripts and in Ray's workers."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    monkeypatch.chdir(tmp_path)
    name = f"here_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    assert find("rollout.reward", f"{name}:two", ("prompt", "text"))(1, 2) == (1, 2)


TAKEN = ("scripts", "trainer", "json", "pytest", "yaml")
"""Names of packages of this project, of the standard library and of others."""


def forget_folder() -> None:
    """Forget what was loaded of another current folder: a process has one."""
    for module in [module for module in sys.modules if module.startswith(ASIDE)]:
        del sys.modules[module]


@pytest.mark.parametrize("is_first", [False, True], ids=["as a console script", "as python -m"])
@pytest.mark.parametrize("top", TAKEN)
def test_the_current_folder_comes_first_though_a_package_has_the_name(
    top: str, is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_folder()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path] if is_first else list(sys.path))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / top
    folder.mkdir()
    (folder / "reward.py").write_text("from .helpers import PAID\ndef score(prompt, text): return PAID\n")
    (folder / "helpers.py").write_text("PAID = 7\n")
    before = importlib.import_module(top)
    assert find("rollout.reward", f"{top}.reward:score", ("prompt", "text"))(1, 2) == 7
    assert importlib.import_module(top) is before, "what others import is as it was"
    (tmp_path / f"{top}.py").write_text("def other(prompt, text): return 8\n")
    shutil.rmtree(folder)
    forget_folder()
    assert find("rollout.reward", f"{top}:other", ("prompt", "text"))(1, 2) == 8
    with pytest.raises(ValueError, match=rf"{top} has no absent; it was loaded from {tmp_path}/{top}.py"):
        find("rollout.reward", f"{top}:absent", ("prompt", "text"))


def test_async_functions_and_classes_are_callable_too(own: str) -> None:
    find("rollout.reward", f"{own}:later", ("prompt", "text"))
    assert type(find("rollout.agent_loop", f"{own}:Loop", ())()).__name__ == "Loop"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm9k", "a.b=gsm9k: must be one of gsm8k, math, or package.module:name"),
        (":two", "a.b=:two: must be one of"),
        ("own:", "a.b=own:: must be one of"),
        ("own:not a name", "a.b=own:not a name: must be one of"),
        ("own..x:two", "a.b=own..x:two: must be one of"),
        ("own/own.py:two", "must be one of gsm8k, math, or package.module:name; did you mean own.own:two?"),
        ("own.py:two", "'own' is not a package; did you mean own:two?"),
        ("own.py", "did you mean own:FUNCTION?"),
        ("own.two", "or package.module:name; did you mean own:two?"),
        ("../own.py:two", "or package.module:name"),
        ("./own.py:two", "or package.module:name; did you mean own:two?"),
        ("own.absent:two", "a.b=own.absent:two: own.absent cannot be imported: ModuleNotFoundError: No module named"),
        ("own.absent:two", "is not a package; is it in the current folder, or on PYTHONPATH?"),
        ("own_broken:two", "own_broken cannot be imported: ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("own_typo:two", "own_typo cannot be imported: SyntaxError: invalid syntax"),
        ("own:too", "a.b=own:too: own has no too; it was loaded from "),
        ("own:NUMBER", "a.b=own:NUMBER: must be a function or a class, but is of type int"),
        ("own:Loop", "a.b=own:Loop: must be callable with (prompt, text): too many positional arguments"),
        ("own:swapped", "(prompt, text): its argument 'text' would be given the prompt"),
        ("own:keyword_only", "a.b=own:keyword_only: must be callable with (prompt, text): too many positional"),
    ],
)
def test_what_cannot_be_called_so_is_refused_with_the_reason(own: str, name: str, message: str) -> None:
    path = name.replace("own", own)
    with pytest.raises(ValueError) as caught:
        find("a.b", path, ("prompt", "text"), known=("gsm8k", "math"))
    assert message.replace("own", own) in str(caught.value)


def test_missing_arguments_are_named(own: str) -> None:
    with pytest.raises(ValueError, match=r"agent_loop=\w+:Sized: must be callable with \(\): missing .* 'size'"):
        find("rollout.agent_loop", f"{own}:Sized", ())
    with pytest.raises(ValueError, match=r"a.b=nowhere: must be package.module:name$"):
        find("a.b", "nowhere", ())
