"""Every key is documented, every recipe composes, and what cannot work is refused with its key, value and a hint."""

import math
import re
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from configs import load
from configs.algorithm import ADVANTAGES, LOSSES, Correction
from configs.checkpoint import is_checkpoint
from configs.checks.ranges import NUM_ARITHMETIC, RANGES, bounds, out_of_range
from configs.cli.overrides import check_overrides
from configs.model import LoraServing
from configs.rewards import BUILT_IN_REWARDS
from configs.schema import Config, ModelKind
from configs.validate import ConfigError, check
from rollout.data.arithmetic import num_problems
from scripts.launch.models import NUM_VAL
from tests.support.compose import changed, refusal


def refused(**values: object) -> str:
    return refusal(changed(Config(), **values))


def schema_keys(section: type = Config, prefix: str = "") -> dict[str, Any]:
    """Every key by its dotted name, with its type."""
    types = typing.get_type_hints(section)
    keys: dict[str, Any] = {}
    for field in fields(section):
        if is_dataclass(types[field.name]):
            keys |= schema_keys(types[field.name], f"{prefix}{field.name}.")
        else:
            keys[prefix + field.name] = types[field.name]
    return keys


def test_every_key_has_documentation_and_a_default() -> None:
    docs = load.key_docs()
    assert set(docs) == set(schema_keys())
    assert [key for key, (_, doc) in docs.items() if not doc] == []
    assert docs["trainer.lr"] == ("0.0003", "AdamW's learning rate after warm-up.")
    defaults = {"model.path": "null", "device": "auto", "dry_run": "false", "rollout.stale_policy": "wait"}
    assert {key: docs[key][0] for key in defaults} == defaults


def test_the_documentation_of_a_choice_names_every_built_in() -> None:
    docs = load.key_docs()
    for key, names in {
        "algorithm.advantage": ADVANTAGES,
        "algorithm.loss": LOSSES,
        "algorithm.correction": [correction.value for correction in Correction],
        "rollout.reward": BUILT_IN_REWARDS,
    }.items():
        assert [name for name in names if not re.search(rf"\b{name}\b", docs[key][1])] == [], key


@pytest.mark.parametrize(
    "argument, hint",
    [
        ("trainer.lrr=1", "trainer.lrr=1: there is no such key; did you mean trainer.lr "),
        ("max_staleness=1", "did you mean rollout.max_staleness"),
        ("+rollout.replicas=2", "rollout.num_replicas"),
        ("receipe=gsm8k", "did you mean recipe"),
        ("zzz=1", "--help lists the sections"),
        ("__pycache_=1", "--help lists the sections"),
    ],
)
def test_an_unknown_key_is_refused_with_a_hint(argument: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_overrides(["trainer.lr=1", argument])
    assert hint in str(caught.value)


def test_known_keys_groups_and_options_pass() -> None:
    check_overrides(["seed=3", "++trainer.lr=1", "recipe=gsm8k", "model=hf", "sizes=hf", "hydra.run.dir=x", "~recipe"])


NUMBERS = [key for key, kind in schema_keys().items() if {int, float} & {kind, *typing.get_args(kind)}]


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_out_of_its_range_is_refused_and_its_bounds_are_not(key: str) -> None:
    low, high = bounds(key)
    name = key.replace(".", "__")
    for value in (low - 1, high * 1.5, 1e30, math.inf, math.nan):
        assert f"{key}={value}: must be between {low:.12g} and {high:.12g}" in refused(**{name: value}).splitlines()
    for bound in (low, high):
        assert list(out_of_range(changed(Config(), **{name: bound}))) == []


def test_ranges_are_of_numbers_that_there_are() -> None:
    assert set(RANGES) <= set(NUMBERS)


def test_no_more_arithmetic_problems_are_asked_for_than_there_are() -> None:
    assert num_problems() - NUM_VAL == NUM_ARITHMETIC


def test_tensorboard_without_its_package_is_refused_where_the_run_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("configs.checks.sections.is_installed", lambda name: False)
    given: dict[str, object] = {"tracking__sinks": ["jsonl", "tensorboard"]}
    line = "tracking.sinks=[jsonl,tensorboard]: tensorboard needs the package tensorboard: pip install tensorboard"
    assert line in refused(**given).splitlines()
    check(changed(Config(), **given), needed_files=())


def test_files_and_sets_of_the_hub_are_taken(tmp_path: Path) -> None:
    one, two = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    one.touch()
    two.touch()
    for train, val in (("openai/gsm8k:main@train", f"{tmp_path}@test"), (f"{one}, {two}", f"{two}")):
        check(changed(Config(), data__train_files=train, data__val_files=val))


def test_all_problems_are_listed_at_once() -> None:
    """Ranges and contradictions together, so that nothing is mended one start at a time. interval=0 divides nothing."""
    lines = refused(
        seed=-1,
        trainer__lr=2.0,
        weight_sync__interval=0,
        rollout__reward="x",
        data__prompt_template="",
        model__path="y",
    ).splitlines()
    keys = ["seed", "trainer.lr", "weight_sync.interval", "model.path", "data.prompt_template", "rollout.reward"]
    assert [line.split("=")[0] for line in lines] == keys


def test_a_command_that_reads_the_held_out_set_only_needs_no_other(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").touch()
    config = changed(Config(), data__train_files="/no/x", data__val_files=f"{tmp_path}/test.jsonl")
    check(config, ["val_files"])
    check(changed(config, data__train_files=None), ["val_files"])
    with pytest.raises(ConfigError, match=r"data\.train_files=/no/x: no such file"):
        check(config)


def test_a_model_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    line = f"model.path={tmp_path}: no Hugging Face model: the folder has no config.json; nor a checkpoint"
    assert refused(model__kind=ModelKind.hf, model__path=str(tmp_path)) == line
    (tmp_path / "config.json").touch()
    check(changed(Config(), model__kind=ModelKind.hf, model__path=str(tmp_path)))


@pytest.mark.parametrize("path", ["/no/model", "~/no/model", "~nobody/model", "./model", "runs/sft/model"])
def test_a_model_that_is_no_folder_here_must_have_a_name_of_the_hub(path: str) -> None:
    hf: dict[str, Any] = {"model__kind": ModelKind.hf}
    line = f"model.path={path}: no such folder, and no name of the hub, which would be NAME or OWNER/NAME"
    assert refused(**hf, model__path=path) == line
    for name in ("gpt2", "Qwen/Qwen2.5-0.5B"):
        check(changed(Config(), **hf, model__path=name))
    check(changed(Config(), **hf, model__path=path, ray__address="auto"))
    served = {"model__lora__rank": 8, "model__lora__serve": LoraServing.adapter, "model__lora__served_path": path}
    assert refused(**hf, model__path="gpt2", **served).startswith(f"model.lora.served_path={path}: no such folder")


def test_what_is_missing_among_runs_is_no_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs" / "sft"
    (run / "checkpoints").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    hf: dict[str, Any] = {"model__kind": ModelKind.hf}
    check(changed(Config(), **hf, model__path="runs/stf"))
    (tmp_path / "runs" / "latest").symlink_to("sft")
    assert refused(**hf, model__path="runs/stf").startswith("model.path=runs/stf: no such folder")
    served = {"model__lora__rank": 8, "model__lora__serve": LoraServing.adapter, "model__lora__served_path": "runs/sft"}
    assert refused(**hf, model__path="runs/sft", **served).startswith("model.lora.served_path=runs/sft: must be a Hugg")


def test_a_run_folder_or_a_checkpoint_may_be_the_model(tmp_path: Path) -> None:
    step = tmp_path / "checkpoints" / "step_000020"
    step.mkdir(parents=True)
    (step / "COMPLETE.json").touch()
    for path in (tmp_path, step):
        check(changed(Config(), model__kind=ModelKind.hf, model__path=str(path)))
        assert is_checkpoint(path)
    (tmp_path / "config.json").touch()
    assert not is_checkpoint(tmp_path), "a Hugging Face folder beside which its trainer keeps its own checkpoints"
