"""Every recipe composes, and tells its plan on a machine that has neither its GPUs nor its data."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from configs.algorithm import Correction, LossAggregation, Proximal, Rejection
from configs.checks.sections import TRAIN_AND_VAL, missing_data
from configs.schema import Config, DType, Layout, ModelKind
from configs.validate import ConfigError
from rollout.environments.search import tags
from scripts.launch import cluster
from scripts.plan import plan
from tests.support.compose import CONFIGS, RECIPES, files, resolve


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", ["", "tiny", "small", "hf"])
def test_every_recipe_composes_with_every_model(recipe: str, model: str, tmp_path: Path) -> None:
    overrides = [f"model={model}"] if model else []
    overrides += ["model.path=org/name"] if model == "hf" else []
    config = resolve(f"recipe={recipe}", *overrides, *files(tmp_path))
    kind = {"small": "tiny"}.get(model, model)
    assert kind in ("", config.model.kind.value)


def test_with_the_tiny_model_the_default_run_is_the_schema() -> None:
    assert resolve("model=tiny") == Config()


def test_a_recipe_needs_its_files_which_a_dry_run_only_misses() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("recipe=gsm8k")
    lines = str(caught.value).splitlines()
    assert [line.split("=")[0] for line in lines] == ["data.train_files", "data.val_files"]
    assert all("no such file" in line and "`slipstream prepare-data all`" in line for line in lines)
    planned = resolve("recipe=gsm8k", "dry_run=true")
    missing = [(problem.key, problem.shown) for problem in missing_data(planned)]
    assert missing == [("data.train_files", "data/gsm8k/train.parquet"), ("data.val_files", "data/gsm8k/test.parquet")]


def test_the_dapo_recipe_has_the_published_values() -> None:
    config = resolve("recipe=dapo_math", "dry_run=true")
    algorithm, rollout, trainer = config.algorithm, config.rollout, config.trainer
    assert (algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.clip_ratio_c) == (0.2, 0.28, 10)
    assert (algorithm.group_size, trainer.prompts_per_step, rollout.max_response_tokens) == (16, 32, 8192)
    assert (algorithm.loss, algorithm.loss_aggregation) == ("ppo_clip", LossAggregation.token_mean)
    assert algorithm.entropy_coef == 0 and not algorithm.needs_reference
    assert (algorithm.filter_groups, algorithm.overlong_buffer_tokens, algorithm.overlong_penalty) == (True, 4096, 1)
    assert (trainer.lr, trainer.lr_warmup_steps, trainer.weight_decay, trainer.max_grad_norm) == (1e-6, 10, 0.1, 1)
    assert (rollout.num_replicas, trainer.num_ranks, rollout.reward) == (4, 4, "dapo")
    assert (config.evaluation.samples, config.evaluation.temperature, config.evaluation.top_p) == (32, 1, 0.7)
    assert rollout.num_agent_workers == 8, "as many as verl's: 512 rewards come at once"
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    assert longest <= (config.model.max_position_embeddings or 0)


def test_the_search_r1_recipe_has_skyrls_values() -> None:
    """The values are those of its fully asynchronous script; the loss rollout_is, in our terms, is weighed in [0.8,
    1.2]."""
    config = resolve("recipe=search_r1", "dry_run=true")
    algorithm, rollout, trainer = config.algorithm, config.rollout, config.trainer
    assert (config.model.path, config.data.max_prompt_tokens) == ("Qwen/Qwen2.5-3B-Instruct", 2048)
    assert (algorithm.group_size, trainer.prompts_per_step, rollout.max_staleness) == (5, 256, 8)
    assert (trainer.lr, trainer.lr_warmup_steps, trainer.max_grad_norm) == (1e-6, 94, 0.5)
    assert (algorithm.kl_loss_coef, algorithm.loss, algorithm.proximal) == (0.001, "reinforce", Proximal.current)
    assert (algorithm.correction, algorithm.icepop_low, algorithm.icepop_high) == (Correction.token_icepop, 0.8, 1.2)
    assert algorithm.rejection is Rejection.seq_mean_k1
    assert (algorithm.rejection_low, algorithm.rejection_high) == (0.99, 1.01)
    assert (rollout.temperature, rollout.top_p, config.evaluation.temperature) == (1, 1, 0)
    assert (rollout.num_replicas, trainer.num_ranks) == (4, 4)
    args = rollout.agent_args
    assert (args["topk"], args["max_turns"], args["max_turn_tokens"]) == (3, 4, 500)
    longest = args["max_turns"] * args["max_turn_tokens"] + 3 * args["topk"] * args["max_document_tokens"]
    assert longest < rollout.max_response_tokens
    assert set(args) < set(inspect.signature(tags.agent_loop).parameters)
    assert tags.STOP == ("</search>", "</answer>")


def test_gsm8k_takes_the_sizes_of_the_model(tmp_path: Path) -> None:
    large = resolve("recipe=gsm8k", *files(tmp_path))
    assert (large.model.kind, large.rollout.num_replicas, large.trainer.num_ranks) == (ModelKind.hf, 2, 2)
    assert (large.rollout.dtype, large.trainer.layout, large.rollout.kv_cache_mb) == (
        DType.bfloat16,
        Layout.packed,
        None,
    )
    small = resolve("recipe=gsm8k", "model=tiny", *files(tmp_path))
    sizes: Any = OmegaConf.to_container(OmegaConf.load(CONFIGS / "sizes" / "tiny.yaml"))
    for section, values in sizes.items():
        for key, value in values.items():
            given = getattr(getattr(small, section), key)
            assert getattr(given, "value", given) == value, f"{section}.{key}"
    assert small.trainer.prompts_per_step == large.trainer.prompts_per_step, "the recipe's, where sizes say nothing"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cluster, plan):
        monkeypatch.setattr(module, "has_gpu", lambda: False)


def lines_of_plan(*overrides: str) -> list[str]:
    config = resolve(*overrides, "dry_run=true")
    return plan.plan("train", config, cluster.resolve_device(config), Path("/run"), TRAIN_AND_VAL).splitlines()


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("recipe", "claims", "num_warnings"),
    [
        ("recipe=arithmetic", "3 CPU", 0),
        ("recipe=dapo_math model=tiny", "3 CPU", 2),
        ("recipe=gsm8k", "5 CPU, 4 GPU", 3),
        ("recipe=dapo_math", "9 CPU, 8 GPU", 3),
    ],
)
def test_a_plan_needs_no_gpu_and_no_data(recipe: str, claims: str, num_warnings: int) -> None:
    lines = lines_of_plan(*recipe.split())
    assert f"     claims: {claims}" in lines
    warnings = [line for line in lines if "warning:" in line]
    assert len(warnings) == num_warnings
    if warnings:
        assert ["data.train_files" in warnings[0], "data.val_files" in warnings[1]] == [True, True]
        assert all("slipstream prepare-data" in line for line in warnings[:2])
        assert all("nvidia-smi lists no GPU" in warning for warning in warnings[2:])


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("gpu_share", "num_replicas", "claims"),
    [(0.5, 1, "3 CPU, 1 GPU"), (0.5, 2, "4 CPU, 2 GPU"), (0.4, 2, "4 CPU, 2 GPU")],
)
def test_a_trainer_and_a_replica_fit_on_one_gpu(gpu_share: float, num_replicas: int, claims: str) -> None:
    """Two replicas of three with 0.4 each are on one GPU, and the third is on another."""
    shared = [f"gpu_share={gpu_share}", "rollout.kv_cache_mb=8192", "device=cuda"]
    lines = lines_of_plan("recipe=gsm8k", *shared, "trainer.num_ranks=1", f"rollout.num_replicas={num_replicas}")
    assert f"     claims: {claims}" in lines
    assert any(f"{num_replicas} x vLLM bfloat16 on {gpu_share} GPU(s)" in line for line in lines)


@pytest.mark.usefixtures("no_gpu")
def test_a_run_is_refused_what_a_plan_only_warns_of(tmp_path: Path) -> None:
    config = resolve("recipe=gsm8k", *files(tmp_path))
    with pytest.raises(ConfigError, match="rollout.kv_cache_mb=None: on CPU the KV cache needs a size"):
        cluster.resolve_device(config)
    with pytest.raises(ConfigError, match="device=cuda: nvidia-smi lists no GPU"):
        cluster.resolve_device(resolve("recipe=gsm8k", "device=cuda", *files(tmp_path)))
