"""What a command line resolves to, and the one line that says what is wrong with it."""

from pathlib import Path

import pytest

from configs.cli.overrides import check_overrides
from configs.validate import ConfigError
from tests.support.compose import resolve


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_overrides(overrides)
        resolve(*overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("algorithm.adv_estimator", "verl's algorithm.adv_estimator is algorithm.advantage here"),
        ("adv_estimator", "verl's algorithm.adv_estimator is algorithm.advantage here"),
        ("lr", "did you mean critic.lr or trainer.lr?"),
        ("actor_rollout_ref.rollout.n", "verl's actor_rollout_ref.rollout.n is algorithm.group_size here"),
        ("actor.optim.lr", "verl's actor_rollout_ref.actor.optim.lr is trainer.lr here"),
        ("learning_rate", "TRL's learning_rate is trainer.lr here"),
        ("trainer.learning_rate", "TRL's learning_rate is trainer.lr here"),
        (
            "orchestrator.batch_size",
            "prime-rl's orchestrator.batch_size is trainer.prompts_per_step here (in ",
        ),
        ("n_samples_per_prompt", "OpenRLHF's n_samples_per_prompt is algorithm.group_size here"),
        ("generator.n_samples_per_prompt", "SkyRL's generator.n_samples_per_prompt is algorithm.group_size here"),
        ("actor_rollout_ref.actor.ppo_epochs", "verl's actor_rollout_ref.actor.ppo_epochs is trainer.epochs here"),
        ("actor_rollout_ref.rollout.name", "verl's actor_rollout_ref.rollout.name there is no equivalent: vLLM is the"),
    ],
)
def test_the_keys_of_other_frameworks_are_understood(key: str, ours: str) -> None:
    line = refusal(f"{key}=1")
    assert line.startswith(f"{key}=1: there is no such key; ") and ours in line


def test_a_recipe_with_a_key_of_another_framework_is_refused_with_the_same_hint(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "typo.yaml").write_text("# @package _global_\ntrainer:\n  learning_rate: 1.0\n")
    line = refusal(f"hydra.searchpath=[file://{tmp_path}]", "recipe=typo")
    assert "In 'recipe/typo'" in line and line.endswith("TRL's learning_rate is trainer.lr here")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("trainer.lr=abc", "trainer.lr=abc: Value 'abc' of type 'str' could not be converted to Float"),
        ("trainer.lr=???", "trainer.lr: has no value (???): give it one"),
        ("seed=${no.key}", "seed: Interpolation key 'no.key' not found"),
        ("wandb.name=${oc.env:UNSET_HERE}", 'wandb.name: KeyError raised while resolving interpolation: "Environment'),
        (
            "rollout.stale_policy=waitt",
            "rollout.stale_policy=waitt: Invalid value 'waitt', expected one of [wait,",
        ),
        ("trainer.lr={", "trainer.lr={: no viable alternative at input '{'"),
        ("recipe=gsm", "In 'train': Could not find 'recipe/gsm': Available options in 'recipe': agent arithmetic"),
        ("trainer.lr=inf", "trainer.lr=inf: must be between 0 and 1"),
        ("data.num_train=100000000000", "data.num_train=100000000000: must be between 1 and 29168384"),
        ('serve.host="a\0b"', "serve.host='a\\x00b': must not have a null byte"),
        ("data.train_files=3", "data.train_files=3: must be text, or a list of texts"),
        ("~wandb", "~wandb: keys cannot be deleted; set wandb.mode=disabled to turn it off"),
        ("~trainer.lr", "~trainer.lr: keys cannot be deleted; set trainer.lr to another value"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(override: str, line: str) -> None:
    said = refusal(override)
    assert said.startswith(line) and "\n" not in said


def test_a_former_value_is_refused_with_its_new_name(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    for former, now in (("shared_prompt", "tree"), ("padded", "packed")):
        (tmp_path / "recipe" / "old.yaml").write_text(f"# @package _global_\ntrainer:\n  layout: {former}\n")
        for line in (
            refusal(f"trainer.layout={former}"),
            refusal(f"hydra.searchpath=[file://{tmp_path}]", "recipe=old"),
        ):
            assert "trainer.layout" in line and line.endswith(f"[tree, packed, rows]; {former} is called {now} now")


def test_a_reward_whose_module_exits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exits_at_import.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    line = refusal("rollout.reward=exits_at_import:reward")
    assert line.startswith("rollout.reward=exits_at_import:reward: exits_at_import cannot be imported: SystemExit: 0")


def test_data_files_may_be_a_list_as_in_verl(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.jsonl").touch()
    files = [f"{tmp_path}/{name}.jsonl" for name in "abc"]
    config = resolve(f"data.train_files=[{files[0]},{files[1]}]", f"data.val_files={files[2]}")
    assert (config.data.train_files, config.data.val_files) == (f"{files[0]},{files[1]}", files[2])
