"""Python scripts with TRL's trainers, read by their syntax: nothing is imported or run."""

import ast
from collections.abc import Mapping
from typing import Any

from scripts.migrate.settings import Setting, Unknown, Unread, UnreadableError

CONFIGS = ("GRPOConfig", "AsyncGRPOConfig")
TRAINERS = ("GRPOTrainer", "AsyncGRPOTrainer")
POSITIONS = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")
"""The parameters of a trainer, in their order."""
ASYNC = {"max_completion_length": 2048, "lr_scheduler_type": "constant", "max_staleness": 4}
"""The defaults of AsyncGRPOConfig that are not those of GRPOConfig."""
INSTEAD = "is supervised fine-tuning, whose keys are others: write a command of slipstream sft (docs/sft.md)"
ADAPTERS = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
}
"""Arguments of PEFT's LoraConfig, by the names that TRL's own options have."""
PEFT = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""The defaults of LoraConfig, which are not those of TRL's options."""


def read_python(text: str) -> list[Setting]:
    """Return the arguments of GRPOConfig, GRPOTrainer and LoraConfig, and of the `load_dataset` of the training data,
    and what is set of a config after it was made. What else these calls have is Unread.

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
            settings += _of_config(callee, call, arguments, names)
        elif callee == "LoraConfig":
            adapter = {**PEFT, **arguments}
            settings += [Setting(name, adapter[key]) for key, name in ADAPTERS.items() if key in adapter]
            settings.append(Setting("use_peft", True))
            settings += [_unread(callee, key) for key in arguments if key not in (*ADAPTERS, "task_type")]
        elif callee in TRAINERS:
            settings += _of_trainer(call, arguments, names)
        if callee in (*CONFIGS, *TRAINERS, "LoraConfig"):
            settings += [_unread(callee, f"**{ast.unparse(word.value)}") for word in call.keywords if word.arg is None]
    settings += _set_later(tree, names)
    if not settings:
        called = {_last_name(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        if fine_tuning := called & {"SFTConfig", "SFTTrainer"}:
            raise UnreadableError(f"{max(fine_tuning)} {INSTEAD}")
        raise UnreadableError(f"has no call of {', '.join((*CONFIGS, *TRAINERS))}")
    return settings


def _of_config(
    callee: str, call: ast.Call, arguments: Mapping[str, Any], names: Mapping[str, ast.expr]
) -> list[Setting]:
    """The first argument without a name is output_dir."""
    inherited = ASYNC if callee == "AsyncGRPOConfig" else {}
    values = {**inherited, **({"output_dir": _value(call.args[0], names)} if call.args else {}), **arguments}
    unread = [_unread(callee, ast.unparse(argument)) for argument in call.args[1:]]
    return [*(Setting(key, value) for key, value in values.items()), *unread]


def _of_trainer(call: ast.Call, arguments: Mapping[str, Any], names: Mapping[str, ast.expr]) -> list[Setting]:
    kept = {"model": "model_name_or_path", "reward_funcs": "reward_funcs", "environment_factory": "environment_factory"}
    nodes = dict(zip(POSITIONS, call.args, strict=False))
    nodes |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    settings: list[Setting] = []
    for key, node in nodes.items():
        if key in kept:
            settings.append(Setting(kept[key], arguments.get(key, _value(node, names))))
        elif key in ("train_dataset", "eval_dataset"):
            settings.append(Setting(key, _data_set(node, names)))
        elif key != "args" and not (key == "peft_config" and _makes(node, names, ("LoraConfig",))):
            settings.append(Setting(f"{key}={ast.unparse(node)}", Unread("this argument of the trainer is not read")))
    return settings


def _set_later(tree: ast.Module, names: Mapping[str, ast.expr]) -> list[Setting]:
    """Return what is assigned to attributes of a config, or of a trainer's `args`."""
    settings: list[Setting] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets, value = node.targets, _value(node.value, names)
        elif isinstance(node, ast.AugAssign):
            targets, value = [node.target], Unknown(ast.unparse(node))
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Attribute) and _is_config(target.value, names):
                settings.append(Setting(target.attr, value))
    return settings


def _is_config(node: ast.expr, names: Mapping[str, ast.expr]) -> bool:
    return _makes(node, names, CONFIGS) or (isinstance(node, ast.Attribute) and node.attr == "args")


def _makes(node: ast.expr, names: Mapping[str, ast.expr], callees: tuple[str, ...]) -> bool:
    """Return whether this is a call of one of these, or a name of what it made."""
    made = names.get(node.id) if isinstance(node, ast.Name) else node
    return isinstance(made, ast.Call) and _last_name(made.func) in callees


def _unread(callee: str, argument: str) -> Setting:
    return Setting(f"{callee}({argument})", Unread("this argument is not read"))


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
