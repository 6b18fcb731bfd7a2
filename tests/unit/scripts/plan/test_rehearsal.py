"""A rehearsal runs the train worker's own code, and counts what it does."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from configs.algorithm import Proximal
from configs.model import LoraConfig
from configs.schema import Config, DType, Layout
from configs.trainer import GradientCheckpointing
from configs.validate import ConfigError
from scripts.plan.machine import Machine, refusals
from scripts.plan.model_shape import shape_of
from scripts.plan.rehearsal.cards import CARDS, find_card, find_reach
from scripts.plan.rehearsal.counting import Operation
from scripts.plan.rehearsal.rehearsal import Rehearsal, rehearse, rehearsed_memory
from scripts.plan.rehearsal.roofline import part_times, replica_time, step_time
from tests.support.compose import changed
from tests.support.families import random_model
from trainer.losses.objective import Objective

HIDDEN, LAYERS, HEADS, WIDTH, VOCABULARY, TOKENS, RANKS = 64, 2, 4, 16, 512, 1024, 4
CONFIG = changed(
    Config(),
    trainer__num_ranks=RANKS,
    trainer__tokens_per_micro_batch=TOKENS,
    trainer__layout=Layout.packed,
    trainer__dtype=DType.bfloat16,
    trainer__gradient_checkpointing=GradientCheckpointing.full,
    trainer__unsharded_gradients_mb=0,
    rollout__dtype=DType.bfloat16,
    checkpoint__every=0,
    data__max_prompt_tokens=128,
    rollout__max_response_tokens=128,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config.json and no weights."""
    path = tmp_path_factory.mktemp("model")
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": WIDTH}
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS}
    model = Qwen3Config(
        vocab_size=VOCABULARY, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"], **heads, **sizes
    )
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def rehearsal(folder: Path) -> Rehearsal:
    return rehearse(CONFIG, "cuda", str(folder))


def memory(config: Config, rehearsal: Rehearsal, where: str = "device") -> dict[str, float]:
    shape = shape_of(rehearsal.parameters, rehearsal.model)
    found = rehearsed_memory(config, shape, rehearsal, "cuda")
    return {part.name: part.num_bytes for part in getattr(found, where)}


def num_parameters(rehearsal: Rehearsal) -> int:
    return sum(torch.Size(shape).numel() for shape in rehearsal.parameters.values())


def operations(rehearsal: Rehearsal, part: str, kind: str) -> list[Operation]:
    """The operations of the first micro-batch."""
    return [op for op in rehearsal.operations[0] if (op.part, op.kind) == (part, kind)]


@pytest.mark.slow
def test_a_rank_has_its_share_of_weights_and_moments(rehearsal: Rehearsal) -> None:
    share, found = num_parameters(rehearsal) / RANKS, memory(CONFIG, rehearsal)
    assert found["weights"] == pytest.approx(4 * share, rel=0.01)
    assert found["moments"] == pytest.approx(8 * share, rel=0.01)


@pytest.mark.slow
def test_gradients_stay_whole_until_they_are_reduced(folder: Path) -> None:
    config = changed(CONFIG, trainer__unsharded_gradients_mb=1000)
    found = rehearse(config, "cuda", str(folder))
    assert memory(config, found)["gradients"] == pytest.approx(4 * num_parameters(found), rel=0.01)
    [last] = [sum(op.num_bytes for op in ops if op.kind == "wire") for ops in found.operations[1:2]]
    assert sum(op.num_bytes for op in found.operations[0] if op.kind == "wire") < last


def test_the_products_of_a_pass_are_those_of_the_model(rehearsal: Rehearsal) -> None:
    """Two operations for each weight and token, and the head for the sampled half of them."""
    head = VOCABULARY * HIDDEN
    norms = LAYERS * (2 * HIDDEN + 2 * WIDTH) + HIDDEN
    matrices = 2 * TOKENS * (num_parameters(rehearsal) - head - norms) + 2 * (TOKENS // 2) * head
    found = sum(op.flops for op in operations(rehearsal, "forward", "matrix"))
    assert found == pytest.approx(matrices, rel=0.01)
    length = 255  # of each sequence: nothing is predicted from its last token
    pairs = 4 * length * (length + 1) / 2
    [*layers] = operations(rehearsal, "forward", "attention")
    assert len(layers) == LAYERS
    assert layers[0].flops == pytest.approx(4 * pairs * HEADS * WIDTH, rel=0.01)  # and a little padding


def test_ranks_send_the_weights_once_and_receive_the_others(rehearsal: Rehearsal) -> None:
    gathered = 2 * num_parameters(rehearsal) * (1 - 1 / RANKS)  # in bfloat16
    assert sum(op.num_bytes for op in operations(rehearsal, "forward", "wire")) == pytest.approx(gathered, rel=0.01)
    backward = sum(op.num_bytes for op in operations(rehearsal, "backward", "wire"))
    reduced = 2 * gathered  # in float32, after every micro-batch
    layers = gathered * (1 - VOCABULARY * HIDDEN / num_parameters(rehearsal))
    assert backward == pytest.approx(layers + reduced, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "times"), [("none", 1), ("selective", 1), ("full", 2)])
def test_attention_is_computed_again_only_where_nothing_is_kept(kept: str, times: int, folder: Path) -> None:
    config = changed(CONFIG, trainer__gradient_checkpointing=GradientCheckpointing(kept))
    found = rehearse(config, "cuda", str(folder))
    forward, backward = (operations(found, part, "attention") for part in ("forward", "backward"))
    again = [op for op in backward if op.flops == forward[0].flops]
    assert (len(forward), len(again)) == (LAYERS, LAYERS * (times - 1))


@pytest.mark.slow
def test_every_wait_of_the_host_is_shown_with_its_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting(Objective):
        def __call__(self, logprobs: Any, *arguments: Any, **keys: Any) -> Any:
            logprobs.sum().item()
            return super().__call__(logprobs, *arguments, **keys)

    monkeypatch.setattr("trainer.worker.worker.Objective", Waiting)
    lines = rehearse(CONFIG, "cuda", str(folder)).host_reads
    [mine] = [times for place, times in lines.items() if place.startswith("tests/unit/scripts/plan/test_rehearsal.py")]
    assert mine == 2  # micro-batches
    assert any(place.startswith("trainer/losses/importance.py") for place in lines)
    in_attention = [times for place, times in lines.items() if place.startswith("trainer/worker/attention/varlen.py")]
    assert in_attention == [2]  # not for each layer: FSDP must hand on a mask as it is


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"algorithm__advantage": "gae", "algorithm__kl_loss_coef": 0.1},
        {"model__lora": LoraConfig(rank=8, dropout=0.1)},
        {"trainer__sequence_parallel": 2, "trainer__layout": Layout.tree},
        {"trainer__mini_batches": 2, "algorithm__proximal": Proximal.current},
        {"algorithm__proximal": Proximal.exact},
        {"trainer__optimizer_on_host": True, "trainer__activation_offload": True},
        {"trainer__layout": Layout.rows, "trainer__num_ranks": 1},
    ],
    ids=["critic_and_reference", "lora", "shared_rows", "mini_batches", "old_versions", "on_host", "rows"],
)
def test_any_config_is_rehearsed(keys: dict[str, Any], folder: Path) -> None:
    config = changed(CONFIG, **keys)
    found = rehearse(config, "cuda", str(folder))
    parts = memory(config, found)
    assert parts["weights"] > 0 and step_time(found, CARDS["H100"], config).micro_batch_s > 0
    if config.trainer.optimizer_on_host:
        assert "moments" not in parts and memory(config, found, "host")["moments"] > 0
    if config.algorithm.needs_critic:  # whose moments are as large as the policy's, less the head's
        assert parts["moments"] > 1.8 * 8 * num_parameters(found) / RANKS


def test_what_does_not_fit_is_refused_with_the_key_to_change(rehearsal: Rehearsal) -> None:
    shape, found = shape_of(rehearsal.parameters, rehearsal.model), memory(CONFIG, rehearsal)
    rank = rehearsed_memory(CONFIG, shape, rehearsal, "cuda")
    config = changed(CONFIG, rollout__kv_cache_mb=1)
    roomy, tight = (Machine(gpu=sum(found.values()) * share, host=None, shared=None) for share in (1.0, 0.8))
    assert refusals(config, shape, "cuda", roomy, rank=rank) == []
    [refused, *_] = refusals(config, shape, "cuda", tight, rank=rank)
    assert refused.startswith("trainer.") and "a train worker's GPU needs" in refused


def test_a_kernel_takes_as_long_as_its_products_or_its_bytes() -> None:
    card = replace(CARDS["H100"], bfloat16=100.0, hbm=10.0, nvlink=5.0, network=1.0)
    matrix, copy = Operation("forward", "matrix", 300.0, 10.0), Operation("forward", "memory", 0.0, 20.0)
    [both] = part_times([matrix, copy], card, num_ranks=8)
    assert (both.compute_s, both.seconds) == (3.0 + 2.0, 5.0)
    wire = Operation("forward", "wire", 0.0, 30.0)
    [with_wire], [far] = (part_times([matrix, wire], card, num_ranks=ranks) for ranks in (8, 16))
    assert (with_wire.seconds, far.seconds) == (6.0, 30.0)


def test_an_engine_reads_its_weights_in_every_step(rehearsal: Rehearsal) -> None:
    shape, card = shape_of(rehearsal.parameters, rehearsal.model), CARDS["H200"]
    found = replica_time(CONFIG, shape, rehearsal, card)
    assert found.step_s == 2 * num_parameters(rehearsal) / card.hbm
    assert found.step_s_per_token == 2 * 2 * LAYERS * HEADS * WIDTH / card.hbm
    two = replica_time(changed(CONFIG, rollout__tensor_parallel_size=2), shape, rehearsal, card)
    assert two.step_s == found.step_s / 2


def test_what_is_reached_is_what_a_gpu_check_measured_or_what_is_public(tmp_path: Path) -> None:
    card = find_card("h100")
    assert "torchtitan" in find_reach(card, tmp_path).training.source
    (tmp_path / "trainer_1.5b.json").write_text(json.dumps({"figures": {"mfu": 0.3}}))
    updates = {"weights_gb": 3.2, "host_floor_ms": 100.0}
    (tmp_path / "updates_1.5b.json").write_text(json.dumps({"figures": updates}))
    found = find_reach(card, tmp_path)
    assert found.training.value == pytest.approx(0.4) and "trainer_1.5b.json" in found.training.source
    assert found.transfers.value == pytest.approx(0.5)  # 32 of 64 GB/s
    with pytest.raises(ConfigError, match="card=V100: must be one of A100, H100, H200, B200"):
        find_card("V100")


@pytest.mark.slow
def test_divided_experts_are_weights_of_their_rank_and_their_tokens_go_over_the_wire(tmp_path: Path) -> None:
    random_model("qwen3_moe", num_experts=8).save_pretrained(tmp_path)
    gathered, divided = (
        rehearse(changed(CONFIG, trainer__expert_parallel=way), "cuda", str(tmp_path)) for way in (False, True)
    )
    ours, theirs = memory(CONFIG, divided), memory(CONFIG, gathered)
    for part in ("weights", "moments", "gradients"):
        assert ours[part] == pytest.approx(theirs[part], rel=0.01), part
    assert ours["gathered weights"] < theirs["gathered weights"]
    flops, same = (sum(op.flops for op in operations(run, "forward", "matrix")) for run in (divided, gathered))
    assert flops == pytest.approx(same, rel=0.01)
    sizes = {"num_layers": 4, "experts_per_token": 2, "hidden": 32}
    there_and_back = (
        2 * sizes["num_layers"] * sizes["experts_per_token"] * sizes["hidden"] * TOKENS * 2 * (1 - 1 / RANKS)
    )
    sent = sum(op.num_bytes for op in operations(divided, "forward", "wire"))
    kept = sum(op.num_bytes for op in operations(gathered, "forward", "wire"))
    weights = 2 * sizes["num_layers"] * 8 * 3 * 16 * sizes["hidden"] * (1 - 1 / RANKS)
    assert sent - kept == pytest.approx(there_and_back - weights, rel=0.05)
