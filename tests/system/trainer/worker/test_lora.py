"""Train workers with adapters over FSDP2 and gloo against a plain float64 trainer; their checkpoints and exports."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM

from configs.model import LoraConfig, LoraServing
from configs.schema import AlgorithmConfig, Config, DType, Layout, ModelConfig, RolloutConfig, TrainerConfig
from configs.trainer import GradientCheckpointing
from rollout.types import TrajectoryGroup
from tests.support import batches, worker_runs
from tests.support.fakes import make_order
from tests.support.families import loaded, random_model
from tests.support.reference import VOCAB_SIZE, double, grpo_loss, random_groups, sampled_logprobs
from tests.support.worker_runs import SAVED_AT, Job, Outcome, one_rank, pack, running_worker
from trainer.checkpoint.store import Checkpoint, CheckpointError, CheckpointStore
from trainer.learning_rate import num_warmup_steps
from trainer.tiny.model import build_model, build_tokenizer
from trainer.worker.export import export_adapter, export_hf
from trainer.worker.loading import local
from trainer.worker.lora import add_adapters, draw_factors
from trainer.worker.state import policy_weights
from weight_sync.adapter import PREFIX, factor_names, merged, published_name

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("process_as_it_was")]
TIMEOUT_S = 60.0
NUM_STEPS = 4
LORA = LoraConfig(rank=4, alpha=8.0)
CONFIG = Config(
    model=ModelConfig(lora=LORA),
    algorithm=AlgorithmConfig(group_size=4, kl_loss_coef=0.1),
    rollout=RolloutConfig(temperature=0.8),
    trainer=TrainerConfig(lr=1e-2, lr_warmup_steps=2, weight_decay=0.1, max_grad_norm=0.05, step_timeout_s=TIMEOUT_S),
)
FULL = GradientCheckpointing.full
EXPERTS = replace(
    CONFIG,
    model=ModelConfig(lora=replace(LORA, targets=["q_proj", "experts"])),
    algorithm=AlgorithmConfig(group_size=4),
    trainer=replace(CONFIG.trainer, gradient_checkpointing=FULL),
)
DROPPING = replace(CONFIG, model=ModelConfig(lora=replace(LORA, dropout=0.2)))


@pytest.fixture(scope="module")
def steps() -> list[list[TrajectoryGroup]]:
    model = double(build_model(VOCAB_SIZE, seed=0))
    return [random_groups(model, seed=seed, temperature=0.8) for seed in range(NUM_STEPS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


def scored(steps: Sequence[Sequence[TrajectoryGroup]], num_ranks: int) -> Any:
    """Batches with the logprobs of the first policy, by plain forwards."""
    first = build_model(VOCAB_SIZE, seed=0)
    return [
        batches.pack(
            groups,
            Layout.packed,
            num_ranks,
            48,
            keep_idle=True,
            reference_logprobs=sampled_logprobs(first, groups, 0.8),
        )
        for groups in steps
    ]


@pytest.fixture(scope="module")
def runs(process_as_it_was: None, folder: Path, steps: list[list[TrajectoryGroup]]) -> dict[str, Outcome]:
    """Run on one rank and on two, saved while they go on and resumed from each other; and with dropout."""
    build_model(VOCAB_SIZE, seed=0).save_pretrained(folder / "model")
    alone, both = (Job(CONFIG, str(folder / "model"), scored(steps, ranks)) for ranks in (1, 2))
    dropping = replace(alone, config=DROPPING)
    one = one_rank(replace(alone, save=str(folder / "by_one")))
    found = {"dropping": one_rank(replace(dropping, save=str(folder / "dropped")))}
    found["dropping resumed"] = one_rank(replace(dropping, load=str(folder / "dropped")))
    jobs = {"two": replace(both, save=str(folder / "by_two")), "1 -> 2": replace(both, load=str(folder / "by_one"))}
    on_two = worker_runs.two_ranks(jobs, folder / "answer.pickle", TIMEOUT_S)
    return {"one": one, "2 -> 1": one_rank(replace(alone, load=str(folder / "by_two")))} | on_two | found


def plain_run(steps: Sequence[Sequence[TrajectoryGroup]]) -> tuple[list[float], dict[str, Tensor]]:
    """(gradient norm of every step, final factors), by torch's own AdamW in float64."""
    first = build_model(VOCAB_SIZE, seed=0)
    model: Any = build_model(VOCAB_SIZE, seed=0)
    add_adapters(model, LORA, torch.float32)
    draw_factors(model, CONFIG.seed)
    model.double()
    factors = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    trainer, norms = CONFIG.trainer, []
    adamw = torch.optim.AdamW(factors.values(), betas=(0.9, 0.95), weight_decay=trainer.weight_decay)
    for step, groups in enumerate(steps):
        adamw.zero_grad()
        grpo_loss(model, groups, CONFIG, double(first)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(factors.values(), trainer.max_grad_norm).item())
        adamw.param_groups[0]["lr"] = trainer.lr * min(1.0, (step + 1) / num_warmup_steps(trainer))
        adamw.step()
    return norms, {published_name(name): factor.detach() for name, factor in factors.items()}


def read_adapter(found: Outcome) -> dict[str, Tensor]:
    return {name: weight for name, weight in found.weights.items() if name.startswith(PREFIX)}


@pytest.mark.parametrize("name", ["one", "two"])
def test_one_rank_and_two_are_the_plain_trainer_and_the_base_stays(
    name: str, runs: dict[str, Outcome], steps: list[list[TrajectoryGroup]]
) -> None:
    norms, factors = plain_run(steps)
    assert [metrics["actor/grad_norm"] for metrics in runs[name].metrics] == pytest.approx(norms, rel=1e-4)
    found = read_adapter(runs[name])
    assert found.keys() == factors.keys()
    for factor, expected in factors.items():
        assert (found[factor].double() - expected).norm() < 1e-4 * expected.norm(), factor
    for weight, expected in build_model(VOCAB_SIZE, seed=0).named_parameters():
        assert torch.equal(runs[name].weights[weight], expected), weight


def test_the_reference_is_the_model_with_its_adapters_off(
    runs: dict[str, Outcome], folder: Path, steps: list[list[TrajectoryGroup]]
) -> None:
    """The reference is asked after four steps, and no second model is there."""
    expected = sampled_logprobs(double(build_model(VOCAB_SIZE, seed=0)), steps[-1], 0.8)
    for name in ("one", "two"):
        assert runs[name].scores.keys() == {"reference_logprobs", "kl"}
        assert runs[name].scores["reference_logprobs"] == pytest.approx(expected, abs=1e-5)
    with running_worker(CONFIG, str(folder / "model")) as (worker, inbox):
        assert worker._reference is worker._policy


@pytest.mark.parametrize(("whole", "resumed"), [("two", "2 -> 1"), ("one", "1 -> 2")])
def test_a_resumed_run_goes_on_where_it_was(whole: str, resumed: str, runs: dict[str, Outcome]) -> None:
    norms = [metrics["actor/grad_norm"] for metrics in runs[whole].metrics[SAVED_AT:]]
    assert [metrics["actor/grad_norm"] for metrics in runs[resumed].metrics] == pytest.approx(norms, rel=1e-4)
    for name, factor in read_adapter(runs[whole]).items():
        torch.testing.assert_close(read_adapter(runs[resumed])[name], factor, rtol=0, atol=1e-5)


def test_what_is_dropped_is_the_same_when_a_step_is_taken_again(runs: dict[str, Outcome]) -> None:
    whole, resumed = read_adapter(runs["dropping"]), read_adapter(runs["dropping resumed"])
    assert all(torch.equal(resumed[name], factor) for name, factor in whole.items())
    assert not all(torch.allclose(factor, read_adapter(runs["one"])[name]) for name, factor in whole.items())


def test_a_checkpoint_holds_the_factors_and_their_moments_only(folder: Path, runs: dict[str, Outcome]) -> None:
    weights = policy_weights(folder / "by_two")
    assert {published_name(name) for name in weights} == read_adapter(runs["two"]).keys()
    saved = FileSystemReader(folder / "by_two").read_metadata().state_dict_metadata
    of_policy = {name for name, entry in saved.items() if name.startswith("policy.") and is_matrix(entry)}
    assert len(of_policy) == 3 * len(weights) and all(".lora_" in name for name in of_policy)


def is_matrix(entry: Any) -> bool:
    return isinstance(entry, TensorStorageMetadata) and len(entry.size) == 2


def test_another_base_is_refused(folder: Path, runs: dict[str, Outcome]) -> None:
    build_model(VOCAB_SIZE, seed=1).save_pretrained(folder / "other")
    refusal = pytest.raises(RuntimeError, match="the checkpoint's adapter is for weights with the checksum")
    with running_worker(CONFIG, str(folder / "other")) as (worker, _), refusal:
        worker.load_checkpoint(folder / "by_one")


@pytest.mark.parametrize("layout", Layout)
def test_in_bfloat16_a_base_of_bfloat16_has_float32_masters_beside_it(
    layout: Layout, folder: Path, steps: list[list[TrajectoryGroup]], runs: dict[str, Outcome]
) -> None:
    config = replace(CONFIG, trainer=replace(CONFIG.trainer, dtype=DType.bfloat16, gradient_checkpointing=FULL))
    config = replace(config, algorithm=AlgorithmConfig(group_size=4))
    with running_worker(config, str(folder / "model")) as (worker, inbox):
        metrics = worker.train_step(pack(steps[:1], layout, 1)[0].micro_batches[0], 0).metrics
        assert metrics["actor/grad_norm"].value == pytest.approx(runs["one"].metrics[0]["actor/grad_norm"], rel=0.1)
        dtypes = {parameter.requires_grad: parameter.dtype for parameter in worker._policy.parameters()}
        assert dtypes == {True: torch.float32, False: torch.bfloat16}


def test_the_base_travels_to_new_replicas_only(folder: Path, runs: dict[str, Outcome]) -> None:
    with running_worker(CONFIG, str(folder / "model")) as (worker, inbox):
        first = worker.publish(make_order(0))
        names = set(inbox.weights)
        assert {name for name in names if not name.startswith(PREFIX)} == {
            name for name, _ in build_model(VOCAB_SIZE, seed=0).named_parameters()
        }
        second = worker.publish(replace(make_order(1), has_new=False))
        assert set(inbox.weights) == {name for name in names if name.startswith(PREFIX)} != set()
        assert first.adapter == second.adapter and first.adapter is not None and first.adapter.scale == 2.0


def test_the_base_travels_to_nobody_who_has_weights_of_its_own(folder: Path, runs: dict[str, Outcome]) -> None:
    beside = replace(CONFIG, model=ModelConfig(lora=replace(LORA, serve=LoraServing.adapter)))
    with running_worker(beside, str(folder / "model")) as (worker, inbox):
        worker.publish(make_order(0))
        assert inbox.weights and all(name.startswith(PREFIX) for name in inbox.weights)


@pytest.fixture(scope="module")
def checkpoint(runs: dict[str, Outcome], folder: Path) -> Checkpoint:
    """Return the checkpoint of the run on two ranks, as it lies on disk."""
    return sealed(CONFIG, folder)


def sealed(config: Config, folder: Path) -> Checkpoint:
    store = CheckpointStore(folder / "checkpoints")
    aside = store.begin(SAVED_AT)
    shutil.copytree(folder / "by_two", aside / "train")
    build_tokenizer(["0123456789"]).save_pretrained(folder / "model")
    with running_worker(config, str(folder / "model")) as (worker, inbox):
        files = worker.model_files()
    marker = store.seal(aside, SAVED_AT, {f"model/{name}": data for name, data in files.items()})
    return store.publish(aside, SAVED_AT, marker)


def test_exports_are_the_merged_weights_of_replicas_and_peft_s_layout(checkpoint: Checkpoint, folder: Path) -> None:
    factors = {published_name(name): factor for name, factor in policy_weights(checkpoint.train_folder).items()}
    export_adapter(checkpoint, folder / "adapter", torch.float32)
    saved = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert saved.keys() == factors.keys() and all(torch.equal(saved[name], factors[name]) for name in factors)
    text = (folder / "adapter" / "adapter_config.json").read_text()
    for line in ('"r": 4', '"lora_alpha": 8,', '"peft_type": "LORA"', '"q_proj"', f'"{folder / "model"}"'):
        assert line in text
    export_hf(checkpoint, folder / "merged", torch.float32)
    found = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
    for name, weight in build_model(VOCAB_SIZE, seed=0).named_parameters():
        a, b = factor_names(name)
        expected = merged(weight.detach(), factors[a], factors[b], 2.0) if a in factors else weight
        assert torch.equal(found.get_parameter(name), expected), name
    assert not (folder / "merged" / "adapter_config.json").exists(), "transformers would look for an adapter"


def test_a_base_that_is_gone_or_another_one_is_not_merged_into(checkpoint: Checkpoint, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds an adapter for .*/nowhere, which cannot be loaded"):
        export_hf(checkpoint, folder / "never", torch.float32, base=str(folder / "nowhere"))
    build_model(VOCAB_SIZE, seed=1).save_pretrained(folder / "other")
    with pytest.raises(CheckpointError, match=r"holds an adapter that is not for .*/other: its weights have"):
        export_hf(checkpoint, folder / "never", torch.float32, base=str(folder / "other"))
    assert not (folder / "never").exists()


def test_adapters_of_experts_are_the_same_on_two_ranks_and_their_export_is_merged(tmp_path: Path) -> None:
    """FSDP2 shards them by experts; a checkpoint of two ranks goes on in one."""
    random_model("qwen3_moe", vocab_size=VOCAB_SIZE).save_pretrained(tmp_path / "model")
    sampler: Any = double(loaded(tmp_path / "model"))
    sampler.config._experts_implementation = "eager"  # the other one has no float64
    steps = [random_groups(sampler, seed=seed, temperature=0.8) for seed in range(SAVED_AT + 1)]
    alone, both = (Job(EXPERTS, str(tmp_path / "model"), pack(steps, Layout.packed, ranks)) for ranks in (1, 2))
    jobs = {"two": replace(both, save=str(tmp_path / "by_two"))}
    two = worker_runs.two_ranks(jobs, tmp_path / "answer.pickle", TIMEOUT_S)["two"]
    resumed = one_rank(replace(alone, load=str(tmp_path / "by_two")))
    expected = one_rank(alone)
    with running_worker(EXPERTS, str(tmp_path / "model")) as (worker, _):
        untrained = copied(worker._policy.causal_lm)
    assert len([name for name in untrained if ".adapters." in name]) == 2 * 2 * 4, "of four layers"
    for found, norms in ((two, expected.metrics), (resumed, expected.metrics[SAVED_AT:])):
        ours, theirs = ([metrics["actor/grad_norm"] for metrics in each] for each in (found.metrics, norms))
        assert ours == pytest.approx(theirs, rel=1e-4)
        for name, first in untrained.items():
            moved, error = expected.weights[name] - first, found.weights[name] - expected.weights[name]
            assert moved.norm() > 0 and error.norm() < 1e-3 * moved.norm(), name

    checkpoint = sealed(EXPERTS, tmp_path)
    factors = {published_name(name): factor for name, factor in policy_weights(checkpoint.train_folder).items()}
    export_hf(checkpoint, tmp_path / "merged", torch.float32)
    merged_model = dict(loaded(tmp_path / "merged").named_parameters())
    for name, weight in loaded(tmp_path / "model").named_parameters():
        a, b = factor_names(name)
        assert (a in factors) == (".experts." in name or "q_proj" in name), name
        of_replicas = merged(weight.detach(), factors[a], factors[b], 2.0) if a in factors else weight
        assert torch.equal(merged_model[name], of_replicas), name
    with pytest.raises(CheckpointError, match=r"has adapters of experts \(.*experts.*\): export it without --adapter"):
        export_adapter(checkpoint, tmp_path / "adapter", torch.float32)


def copied(model: Any) -> dict[str, Tensor]:
    """Return copies of the factors by their published names."""
    named = ((published_name(name), factor) for name, factor in model.named_parameters() if factor.requires_grad)
    return {name: local(factor).clone() for name, factor in named}
