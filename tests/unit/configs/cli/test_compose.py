"""A command line resolves to a config, or to the one line that says what is wrong with it."""

import re
from pathlib import Path

import pytest

from configs import load
from configs.checks.sections import CONVERSATIONS
from configs.cli.compose import compose_job
from configs.cli.overrides import check_options, check_overrides
from configs.schema import Config
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
        ("lr", "did you mean trainer.lr or critic.lr?"),
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
        ("recipe=gsm", "recipe=gsm: there is no such recipe, only agent, arithmetic, code_world"),
        ("trainer.lr=inf", "trainer.lr=inf: must be between 0 and 1"),
        ("data.num_train=100000000000", "data.num_train=100000000000: must be between 1 and 29168384"),
        (f"model.path={'x' * 5000}", f"model.path={'x' * 40}...: no file or folder has a name of more than 255 bytes"),
        (f"serve.token_file=/{'x' * 256}", f"serve.token_file=/{'x' * 39}...: no file or folder has a name of more"),
        ("model.path='~nobody-here/x'", "model.path=~nobody-here/x: there is no user nobody-here on this machine"),
        ('serve.host="a\0b"', "serve.host='a\\x00b': must not have a null byte"),
        ("lr=1e-4", "lr=1e-4: there is no such key; did you mean trainer.lr or critic.lr?"),
        (
            "model=Qwen/Qwen3-0.6B",
            "model=Qwen/Qwen3-0.6B: a model of the hub or of a folder is model=hf model.path=",
        ),
        ("tracking.sinks=wandb", "tracking.sinks=wandb: is a list: tracking.sinks=[wandb]"),
        ("tracking.sinks=[[[[]]]]", "tracking.sinks=[[[[]]]]: must be a list of texts"),
        ("rollout.stop=[END,[a]]", "rollout.stop=['END', ['a']]: must be a list of texts"),
        ("wandb.tags=[{a:1}]", "wandb.tags=[{'a': 1}]: must be a list of texts"),
        ("report_to=wandb", "report_to=wandb: there is no such key; TRL's report_to is tracking.sinks here"),
        ("data.train_files=true", "data.train_files=True: must be text or a number, or a list of these"),
        ("data.train_files=[a,null]", "data.train_files=['a', None]: must be text or a number, or a list of these"),
        ("~wandb", "~wandb: keys cannot be deleted; set wandb.mode=disabled to turn it off"),
        ("~trainer.lr", "~trainer.lr: keys cannot be deleted; set trainer.lr to another value"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(override: str, line: str) -> None:
    said = refusal(override)
    assert said.startswith(line) and "\n" not in said


@pytest.mark.parametrize(
    ("option", "line"),
    [
        (
            "--model_name_or_path",
            "--model_name_or_path: there is no such option; TRL's model_name_or_path is model.path",
        ),
        ("--trainer.lr=3", "--trainer.lr: there is no such option; keys are given as trainer.lr=3"),
        ("--cfg", None),
    ],
)
def test_a_key_that_is_given_as_an_option_is_refused_with_what_it_is_here(option: str, line: str | None) -> None:
    if line is None:
        return check_options([option, "job"])
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}"):
        check_options([option])


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


def test_data_files_may_be_numbers_for_a_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counts.py").write_text("def rows(entries):\n    return []\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = resolve("data.loader=counts:rows", "data.train_files=100", "data.val_files=[10,0.5,x]")
    assert (config.data.train_files, config.data.val_files) == ("100", "10,0.5,x")


@pytest.mark.parametrize("key", ["trainer.eval_every", "evaluation.samples", "data.num_val", "+data.num_val"])
def test_what_evaluations_read_is_refused_where_nothing_is_held_out(key: str) -> None:
    line = refusal("data.val_files=none", f"{key}=1")
    assert line.startswith(f"{key.lstrip('+')}=1: data.val_files=none: nothing is held out, so nothing is evaluated;")


@pytest.mark.parametrize("override", ["sft.hidden_reasoning=drop", "sft.per_step=4", "+sft.max_tokens=9"])
def test_what_conversations_read_is_refused_where_none_are_learned(override: str) -> None:
    key = override.partition("=")[0].lstrip("+")
    assert f"{key}=" in (said := refusal(override)) and "only `slipstream sft`, and training with algorithm.ce" in said
    assert resolve(override, "algorithm.ce_coef=0.1") and resolve(override, "algorithm.ce_coef=0"), "a job of a sweep"
    sft = compose_job("sft", [override]).config
    if key == "sft.per_step":
        with pytest.raises(ConfigError, match="sft.per_step=4: `slipstream sft` takes trainer.prompts_per_step"):
            load.load(sft, CONVERSATIONS, [override])
    else:
        assert load.load(sft, CONVERSATIONS, [override])


def test_a_run_may_hold_nothing_out(tmp_path: Path) -> None:
    """What a recipe says of evaluations is not read then."""
    (tmp_path / "a.jsonl").touch()
    config = resolve("recipe=dapo_math", f"data.train_files={tmp_path}/a.jsonl", "data.val_files=none")
    assert not config.data.holds_out and config.evaluation != Config().evaluation
    assert not resolve("data.val_files=none", "trainer.eval_every=0").data.holds_out
    assert "data.val_files=[]: must name a file, or be none: then nothing is held out" in refusal("data.val_files=[]")
    assert refusal("data.train_files=[]") == "data.train_files=[]: must name a file"


def test_data_files_may_be_a_list_as_in_verl(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.jsonl").touch()
    files = [f"{tmp_path}/{name}.jsonl" for name in "abc"]
    config = resolve(f"data.train_files=[{files[0]},{files[1]}]", f"data.val_files={files[2]}")
    assert (config.data.train_files, config.data.val_files) == (f"{files[0]},{files[1]}", files[2])
