"""Train workers load what transformers loads, row by row, and a rank takes memory for its rows only."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from configs.model import LoraConfig, ModelConfig
from configs.schema import AlgorithmConfig, Config, DType, TrainerConfig
from configs.validate import ConfigError
from tests.support.families import FAMILIES, loaded, random_model
from tests.support.loaded_ranks import Held, LoadJob, load_on_ranks
from trainer.worker.checksum import base_checksum, combine_sums
from trainer.worker.loading import allocate, open_causal_lm
from trainer.worker.lora import add_adapters, draw_factors

pytestmark = pytest.mark.slow

MIB = 2**20
WITH_ALL = Config(algorithm=AlgorithmConfig(advantage="gae", kl_loss_coef=0.1))
LORA = Config(model=ModelConfig(lora=LoraConfig(rank=3)), trainer=TrainerConfig(dtype=DType.bfloat16))
FEW_ROWS = ("qwen2", "mixtral", "gpt2", "gemma2")
"""Biases, norms and heads of fewer rows than ranks; experts that are stacked while they load; tied embeddings."""
TIMEOUT_S = 120.0


def by_transformers(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_is_loaded_as_transformers_loads_it(family: str, tmp_path: Path) -> None:
    random_model(family).save_pretrained(tmp_path)
    expected, found = by_transformers(tmp_path), loaded(tmp_path)
    for kind in ("named_parameters", "named_buffers"):
        tensors, of_transformers = dict(getattr(found, kind)()), dict(getattr(expected, kind)())
        assert list(tensors) == list(of_transformers)
        for name, tensor in of_transformers.items():
            assert torch.equal(tensors[name], tensor) and tensors[name].dtype == tensor.dtype, name


def saved(path: Path, *, parts: int = 1, dtype: torch.dtype = torch.float32, as_bin: bool = False) -> Path:
    model = random_model("qwen2", tie_word_embeddings=True).to(dtype)
    if as_bin:
        model.config.save_pretrained(path)
        torch.save(model.state_dict(), path / "pytorch_model.bin")
    else:
        model.save_pretrained(path, max_shard_size=4 * sum(p.numel() for p in model.parameters()) // parts)
    return path


@pytest.mark.parametrize(
    "given", [{"parts": 4}, {"dtype": torch.bfloat16}, {"dtype": torch.float16}, {"as_bin": True}], ids=str
)
def test_files_of_every_kind(given: dict[str, Any], tmp_path: Path) -> None:
    saved(tmp_path, **given)
    assert (tmp_path / "model.safetensors.index.json").exists() == ("parts" in given)
    expected = dict(by_transformers(tmp_path).named_parameters())
    causal_lm, read_into = open_causal_lm(str(tmp_path))
    allocate(causal_lm, torch.device("cpu"))
    sums = read_into(causal_lm)
    for name, parameter in causal_lm.named_parameters():
        assert torch.equal(parameter, expected[name]) and parameter.dtype == torch.float32, name
    assert causal_lm.lm_head.weight is causal_lm.model.embed_tokens.weight
    assert combine_sums(sums) == base_checksum(by_transformers(tmp_path))


def changed_files(path: Path, tensors: dict[str, torch.Tensor | None]) -> None:
    """`tensors`: what to replace, or None to leave out."""
    file = path / "model.safetensors"
    kept = {name: tensor for name, tensor in {**load_file(file), **tensors}.items() if tensor is not None}
    save_file(kept, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model.norm.weight": None}, "its files have no values for model.norm.weight"),
        ({"model.norm.weight": torch.ones(31)}, r"model.norm.weight is \(31,\) in its files, \(32,\) by its config"),
        ({"lm_head.weight": torch.ones(64, 32)}, "ties .* which differ in its files: set tie_word_embeddings"),
    ],
)
def test_files_that_do_not_fit_the_config_are_refused(
    tensors: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    changed_files(saved(tmp_path), tensors)
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path)


def test_a_tied_parameter_is_found_under_either_name(tmp_path: Path) -> None:
    embedding = by_transformers(saved(tmp_path)).lm_head.weight.detach()
    changed_files(tmp_path, {"model.embed_tokens.weight": None, "lm_head.weight": embedding})
    assert torch.equal(loaded(tmp_path).model.embed_tokens.weight, embedding)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loading")


@pytest.fixture(scope="module")
def large(folder: Path) -> Path:
    """150 MB of float32, in files of 40 MB."""
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    config = Qwen3Config(vocab_size=8192, num_hidden_layers=8, head_dim=64, tie_word_embeddings=True, **sizes)
    Qwen3ForCausalLM(config).save_pretrained(folder / "large", max_shard_size="40MB")
    return folder / "large"


@pytest.fixture(scope="module")
def loads(folder: Path) -> dict[tuple[str, int], list[Held]]:
    """Load by model and number of ranks: small models of every kind with reference and critic, and one with an
    adapter."""
    for family in FEW_ROWS:
        random_model(family).save_pretrained(folder / family)
    jobs = {
        (model, num_ranks): LoadJob(config, folder / name, num_ranks)
        for num_ranks in (4, 2, 1)
        for model, name, config in (*((family, family, WITH_ALL) for family in FEW_ROWS), ("adapter", "qwen2", LORA))
    }
    return dict(zip(jobs, load_on_ranks(list(jobs.values()), 4, folder, TIMEOUT_S), strict=True))


def whole(held: Sequence[Held], name: str) -> torch.Tensor:
    """Put together from the rows of all ranks, which follow one another."""
    rows = [rank.rows[name] for rank in held]
    ends = [part.stop for part, _ in rows]
    assert [part.start for part, _ in rows] == [0, *ends[:-1]]
    return torch.cat([values for _, values in rows])


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("family", FEW_ROWS)
def test_the_rows_of_all_ranks_are_the_model(
    family: str, num_ranks: int, loads: dict[tuple[str, int], list[Held]], folder: Path
) -> None:
    """The critic has its decoder, and a head of zeros."""
    held, model = loads[family, num_ranks], by_transformers(folder / family)
    assert len(held) == num_ranks
    expected = {f"{part}.causal_lm.{n}": p for part in ("policy", "reference") for n, p in model.named_parameters()}
    expected |= {f"critic.backbone.{n}": p for n, p in model.base_model.named_parameters()}
    expected["critic.value_head.weight"] = torch.zeros(1, 32)
    assert held[0].rows.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(whole(held, name), tensor), name
    for name, buffer in model.base_model.named_buffers():
        assert all(torch.equal(rank.buffers[f"critic.backbone.{name}"], buffer) for rank in held), name


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_an_adapter_and_its_base_do_not_depend_on_the_number_of_ranks(
    num_ranks: int, loads: dict[tuple[str, int], list[Held]], folder: Path
) -> None:
    held, model = loads["adapter", num_ranks], by_transformers(folder / "qwen2")
    assert {rank.base for rank in held} == {base_checksum(model)}
    add_adapters(model, LORA.model.lora, torch.bfloat16)
    draw_factors(model, LORA.seed)
    for name, parameter in model.named_parameters():
        found = whole(held, f"policy.causal_lm.{name}")
        assert torch.equal(found, parameter) and found.dtype == parameter.dtype, name


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_takes_memory_for_its_rows_only(num_ranks: int, large: Path, tmp_path: Path) -> None:
    """The rest is what one parameter takes while it is read. A small model is loaded before, for all that is
    imported."""
    random_model("qwen3").save_pretrained(tmp_path / "small")
    jobs = [LoadJob(Config(), model, num_ranks) for model in (tmp_path / "small", large)]
    _, held = load_on_ranks(jobs, num_ranks, tmp_path, TIMEOUT_S)
    index = json.loads((large / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    total = index["metadata"]["total_size"]
    assert total > 140 * MIB
    for rank in held:
        share, peak = total / num_ranks, rank.peak_bytes
        print(f"{num_ranks} ranks: share {share / MIB:.1f} MiB, peak {peak / MIB:.1f} MiB")
        assert share < peak < share + 40 * MIB
