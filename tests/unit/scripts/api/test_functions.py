"""A user's functions reach the processes of a run by their names, or pickled into a module of the current folder."""

import importlib.util
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from configs.runtime.dotted import find
from configs.validate import ConfigError
from rollout.rewards.gsm8k import gsm8k
from scripts.api.functions import FOLDER, environment, python_path, reference, reward, tool
from tests.support.paths import ROOT

KEY = "rollout.reward"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def module_from(file: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def in_a_new_process(path: str, call: str) -> str:
    """What a new process makes of `target`, which it finds by `path` as the processes of a run do."""
    code = f"from configs.runtime.dotted import find_callable\ntarget = find_callable('key', {path!r})\nprint({call})"
    command = [sys.executable, "-P", "-c", code]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=300
    ).stdout.strip()


def test_a_function_of_a_module_that_is_found_goes_by_its_name(here: Path) -> None:
    assert reference(KEY, gsm8k) == "rollout.rewards.gsm8k:gsm8k"
    (here / "half_rewards.py").write_text("def half(prompt, text): return 0.5\n")
    assert reference(KEY, module_from(here / "half_rewards.py", "half_rewards").half) == "half_rewards:half"
    assert not (here / FOLDER).exists()


def test_lambdas_closures_and_functions_of_main_go_pickled_with_what_they_refer_to(here: Path) -> None:
    weight = 3
    main: dict[str, Any] = {"__name__": "__main__"}
    exec("BONUS = 4\ndef helped(text): return len(text) + BONUS\ndef score(prompt, text): return helped(text)", main)
    paths = [reference(KEY, function) for function in (lambda prompt, text: weight * len(text), main["score"])]
    assert [path.rpartition(":")[2] for path in paths] == ["function", "score"]
    assert [in_a_new_process(path, "target(None, 'ab')") for path in paths] == ["6", "6"]
    assert find(KEY, paths[1], ("prompt", "text"))(None, "abc") == 7
    with pytest.raises(ValueError, match="must be callable with \\(prompt\\)"):
        find(KEY, paths[1], ("prompt",))


def test_a_function_of_a_module_that_new_processes_do_not_find_goes_pickled(here: Path) -> None:
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / "hidden_rewards.py").write_text(
        "def longer(text): return len(text)\n\n\ndef score(prompt, text):\n    return longer(text) + 1\n"
    )
    hidden = module_from(here / "elsewhere" / "hidden_rewards.py", "hidden_rewards")
    path = reference(KEY, hidden.score)
    assert path.startswith("runs.functions.score_") and in_a_new_process(path, "target(None, 'abc')") == "4"
    source = (here / path.partition(":")[0].replace(".", "/")).with_suffix(".py").read_text()
    assert "#     return longer(text) + 1" in source  # for people


def test_a_pickled_class_is_found_by_its_name_from_other_processes() -> None:
    """Environments and tools go on to processes of their own, which find them so."""
    main: dict[str, Any] = {"__name__": "__main__"}
    exec("class Guess:\n    def __init__(self, prompt): self.at = prompt\n    def step(self, text): return text", main)
    loaded = find("environment", reference("environment", main["Guess"]), ("prompt",))
    assert pickle.loads(pickle.dumps(loaded("x"))).at == "x"


def test_what_cannot_be_pickled_is_refused_by_its_name() -> None:
    lock = threading.Lock()

    def guarded(prompt: Any, text: str) -> float:
        with lock:
            return 1.0

    with pytest.raises(
        ConfigError, match=r"rollout.reward=<.*guarded of .*>: cannot be sent .*cannot pickle '_thread.lock'"
    ):
        reference(KEY, guarded)
    large = b"x" * 2**25
    with pytest.raises(ConfigError, match="has 32 MiB with what it refers to, and 16 are allowed"):
        reference(KEY, lambda prompt, text: len(large))


def test_decorators_leave_functions_as_they_are_and_refuse_what_cannot_work() -> None:
    def right(prompt: Any, text: str) -> float:
        return 1.0

    def add(left: int, right: int) -> int:
        """Add two numbers."""
        return left + right

    class World:
        def __init__(self, prompt: Any) -> None: ...

        def step(self, text: str) -> None: ...

    assert (reward(right), tool(add), environment(World)) == (right, add, World)
    with pytest.raises(TypeError, match=r"reward function: must be callable with \(prompt, text\)"):
        reward(lambda text: 1.0)
    with pytest.raises(ValueError, match="parameter left has no type"):
        tool(_untyped())
    with pytest.raises(TypeError, match=r"environment Empty: has no step\(turn\)"):
        environment(type("Empty", (), {"__init__": lambda self, prompt: None}))


def _untyped() -> Any:
    names: dict[str, Any] = {}
    exec("def add(left, right): return left", names)
    return names["add"]


def test_new_processes_find_this_checkout_before_the_users_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/users/own")
    assert python_path().split(os.pathsep)[0] == str(ROOT) and python_path().endswith("/users/own")
