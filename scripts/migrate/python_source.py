"""Python scripts with TRL's trainers, read by their syntax: nothing is imported or run."""

import ast
from collections.abc import Mapping
from typing import Any

from scripts.migrate.settings import Setting, Unknown, UnreadableError

CONFIGS = ("GRPOConfig", "AsyncGRPOConfig")
TRAINERS = ("GRPOTrainer", "AsyncGRPOTrainer")
ADAPTERS = {"r": "lora_r", "lora_alpha": "lora_alpha", "target_modules": "lora_target_modules"}
"""Arguments of PEFT's LoraConfig, by the names that TRL's own options have."""


def read_python(text: str) -> list[Setting]:
    """Return the arguments of GRPOConfig, GRPOTrainer and LoraConfig, and of the `load_dataset` of the training data.

    Raises UnreadableError for a file that is no Python, or has none of them.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UnreadableError(f"line {error.lineno} is no Python: {error.msg}") from error
    names = _assigned(tree)
    settings: list[Setting] = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        callee = _last_name(call.func)
        arguments = {keyword.arg: _value(keyword.value, names) for keyword in call.keywords if keyword.arg is not None}
        if callee in CONFIGS:
            settings += [Setting(key, value) for key, value in arguments.items()]
        elif callee == "LoraConfig":
            settings += [Setting(name, arguments[key]) for key, name in ADAPTERS.items() if key in arguments]
        elif callee in TRAINERS:
            settings += _of_trainer(call, arguments, names)
    if not settings:
        raise UnreadableError(f"has no call of {', '.join((*CONFIGS, *TRAINERS))}")
    return settings


def _of_trainer(call: ast.Call, arguments: Mapping[str, Any], names: Mapping[str, ast.expr]) -> list[Setting]:
    kept = {"model": "model_name_or_path", "reward_funcs": "reward_funcs", "environment_factory": "environment_factory"}
    settings = [Setting(name, arguments[key]) for key, name in kept.items() if key in arguments]
    if call.args:
        settings.append(Setting("model_name_or_path", _value(call.args[0], names)))
    for keyword in call.keywords:
        if keyword.arg in ("train_dataset", "eval_dataset"):
            settings.append(Setting(keyword.arg, _data_set(keyword.value, names)))
    return settings


def _data_set(node: ast.expr, names: Mapping[str, ast.expr]) -> str | Unknown:
    """Return the data set as data.train_files names it, such as "openai/gsm8k:main@train"."""
    shown = ast.unparse(node)
    for _ in range(8):  # `dataset = dataset.map(...)` and the like: what was loaded first
        if isinstance(node, ast.Name) and node.id in names:
            node = names[node.id]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and _last_name(node.func) != "load_dataset"
        ):
            node = node.func.value
        else:
            break
    if not (isinstance(node, ast.Call) and _last_name(node.func) == "load_dataset"):
        return Unknown(shown)
    given = [_value(argument, names) for argument in node.args]
    given_by_name = {keyword.arg: _value(keyword.value, names) for keyword in node.keywords}
    split = given_by_name.get("split")
    if not (given and all(isinstance(each, str) for each in given) and isinstance(split, str)):
        return Unknown(ast.unparse(node))
    subset = given[1] if len(given) > 1 else given_by_name.get("name")
    return f"{given[0]}{f':{subset}' if subset else ''}@{split}"


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the first value of each name, as a later one is mostly made of it."""
    names: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            names.setdefault(node.targets[0].id, node.value)
    return names


def _value(node: ast.expr, names: Mapping[str, ast.expr]) -> Any:
    if isinstance(node, ast.Name) and node.id in names and not isinstance(names[node.id], ast.Name):
        return _value(names[node.id], {})
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return Unknown(ast.unparse(node))
    return list(value) if isinstance(value, tuple) else value


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
