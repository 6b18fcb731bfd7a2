"""The command that rehearses a run: its words, and what it hands to the predictor."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Qwen3Config

from configs.schema import Config, Device, DType, Layout, ModelKind
from configs.validate import ConfigError
from scripts.plan.model_shape import LayerShape, ModelShape
from scripts.plan.rehearsal.cards import CARDS, Reach
from scripts.plan.rehearsal.counting import Operation
from scripts.plan.rehearsal.rehearsal import Rehearsal
from scripts.predict.rehearsed import profile_of, setup_of, splits
from scripts.rehearse import Arguments, rehearse_run, split
from scripts.simulate.profile import read_profile
from scripts.simulate.simulate import simulate
from tests.support.compose import changed

SHAPE = ModelShape(
    num_parameters=10**9,
    num_layers=16,
    layer_parameters=50 * 10**6,
    head_parameters=100 * 10**6,
    rest_parameters=200 * 10**6,
    linear=(),
    layer=LayerShape(hidden=2048, query=2048, key=512, norms=4096, feed_forward=8192, is_gated=True, experts=0),
)
CONFIG = changed(
    Config(),
    trainer__num_ranks=2,
    trainer__dtype=DType.bfloat16,
    rollout__dtype=DType.bfloat16,
    rollout__num_replicas=2,
    rollout__kv_cache_mb=None,
)
CARD = CARDS["H100"]


def rehearsed(seconds: float = 1.0, last_s: float = 1.25, optimizer_s: float = 0.5) -> Rehearsal:
    """Passes of so many seconds each on an H100."""

    def group(part: str, seconds: float) -> tuple[Operation, ...]:
        return (Operation(part, "matrix", seconds * CARD.bfloat16, 0.0),)

    groups = (group("forward", seconds), group("forward", last_s), group("optimizer", optimizer_s))
    return Rehearsal(
        parameters={}, model={}, tokens=1000, peak={"Total": 1}, operations=groups, host_reads=Counter(), seconds=0.0
    )


def test_words_of_the_command_are_told_from_keys_of_the_config() -> None:
    own, overrides = split(["recipe=gsm8k", "card=B200", "save=a=b.json", "profile.tool_s=3", "trainer.num_ranks=8"])
    assert own == Arguments(card="B200", save=Path("a=b.json"), profile=("profile.tool_s=3",))
    assert overrides == ["recipe=gsm8k", "trainer.num_ranks=8"]
    assert split(["card", "save"])[1] == ["card", "save"], "no word is dropped: these are refused as no keys"


def test_a_profile_has_the_times_of_the_rooflines_over_what_is_reached() -> None:
    reach = Reach()
    profile = profile_of(CONFIG, SHAPE, rehearsed(), CARD, reach)
    assert profile.train_s_per_token == pytest.approx(1e-3 / reach.training.value)
    assert profile.train_s == pytest.approx((0.5 + 0.25) / reach.training.value)
    assert profile.step_s == pytest.approx(2e9 / CARD.hbm / reach.decoding.value)
    assert any("profile.turn_tokens" in sentence for sentence in profile.assumed)


def test_several_sources_are_taken_for_the_longest_and_the_profile_says_so() -> None:
    sources = {"long": {"rollout": {"max_response_tokens": 4 * CONFIG.rollout.max_response_tokens}}, "short": {}}
    mixed = profile_of(changed(CONFIG, data__sources=sources), SHAPE, rehearsed(), CARD, Reach())
    alone = profile_of(CONFIG, SHAPE, rehearsed(), CARD, Reach())
    assert mixed.turn_tokens.mean == pytest.approx(4 * alone.turn_tokens.mean, rel=0.02)
    assert any("long, short" in sentence for sentence in mixed.assumed)


def test_gpus_are_split_only_as_they_fit_and_the_slower_side_decides() -> None:
    """Weights, moments and gradients of 24 billion parameters need five ranks with 80 GB, whatever runs beside."""
    profile = profile_of(CONFIG, SHAPE, rehearsed(), CARD, Reach())
    found = splits(CONFIG, SHAPE, CARD, profile)
    assert [each.change for each in found] == [{"num_replicas": 4 - ranks, "num_ranks": ranks} for ranks in (1, 2, 3)]
    assert found[0].trainer_s > found[1].trainer_s and found[0].replicas_s < found[1].replicas_s
    assert all(each.step_s == max(each.trainer_s, each.replicas_s) for each in found)
    large = replace(SHAPE, num_parameters=24 * 10**9)
    fitting = splits(changed(CONFIG, trainer__num_ranks=6), large, CARD, profile)
    assert fitting and all(each.num_ranks >= 5 for each in fitting)


def test_the_slower_side_is_the_one_that_is_waited_for() -> None:
    setup = setup_of(changed(CONFIG, trainer__prompts_per_step=4, rollout__max_staleness=0))
    by_optimizer_s = {
        seconds: simulate(profile_of(CONFIG, SHAPE, rehearsed(1e-6, 1e-6, seconds), CARD, Reach()), setup)
        for seconds in (1e-6, 60.0)
    }
    assert by_optimizer_s[60.0].replica_idle > 0.9 > by_optimizer_s[1e-6].replica_idle
    assert by_optimizer_s[60.0].trainer_idle < 0.1 < by_optimizer_s[1e-6].trainer_idle


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen3Config(vocab_size=512, head_dim=16, architectures=["Qwen3ForCausalLM"], **sizes).save_pretrained(path)
    return path


@pytest.mark.slow
def test_a_config_is_rehearsed_and_its_profile_is_the_predictors(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = changed(CONFIG, model__kind=ModelKind.hf, model__path=str(folder), device=Device.cuda, dry_run=True)
    config = changed(config, trainer__prompts_per_step=2, trainer__layout=Layout.packed)
    own = Arguments(card="H100", save=tmp_path / "profile.json", profile=("profile.turn_tokens=20",))
    assert rehearse_run(config, own).exit_code == 0
    *shown, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)
    assert figures["peak_gb"] > 0 and figures["step_s"] > 0 and figures["host_waits"] > 10
    assert any(line.startswith("moments") for line in shown) and any(
        "trainer/worker/worker.py:" in line for line in shown
    )
    assert read_profile(tmp_path / "profile.json").turn_tokens.mean == 20
    with pytest.raises(ConfigError, match="a train worker's GPU needs"):
        rehearse_run(changed(config, ray__gpu_memory_gb=0.001), own)
    with pytest.raises(ConfigError, match="model.path=.*: must be a folder with a config.json"):
        rehearse_run(changed(config, model__path=str(tmp_path)), own)
    with pytest.raises(ConfigError, match="profile.turn_tokins: no such field"):
        rehearse_run(config, replace(own, profile=("profile.turn_tokins=20",)))


@pytest.mark.slow
def test_a_model_that_is_made_here_is_rehearsed_on_cpus_without_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    own = Arguments(card="H100", save=None, profile=())
    assert rehearse_run(changed(Config(), device=Device.cpu, dry_run=True), own).exit_code == 0
    shown = capsys.readouterr().out
    assert "memory of a train worker at its peak" in shown and "rooflines" not in shown
