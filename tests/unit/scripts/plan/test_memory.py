"""The arithmetic of memory: what changes which part, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.algorithm import Proximal
from configs.schema import Config, DType, Staging, Transport
from configs.trainer import GradientCheckpointing
from scripts.plan.budget import travel_parts
from scripts.plan.machine import Machine, refusals
from scripts.plan.memory import (
    Memory,
    kv_tokens,
    layer_bytes,
    rank_memory,
    replica_worker_memory,
    teacher_worker_memory,
    total,
)
from scripts.plan.model_shape import LayerShape, Mixture, ModelShape, model_shape
from tests.support.compose import changed
from trainer.tiny.model import build_model

GIB = 2**30
LAYER = LayerShape(hidden=2048, query=2048, key=512, norms=4096, feed_forward=8192, is_gated=True, experts=0)
BILLION = ModelShape(
    num_parameters=10**9,
    num_layers=16,
    layer_parameters=50 * 10**6,
    head_parameters=100 * 10**6,
    rest_parameters=200 * 10**6,
    linear=(("layers.0.q_proj", 4096), ("layers.0.up_proj", 10240)),
    layer=LAYER,
)
CONFIG = changed(Config(), trainer__num_ranks=4, trainer__dtype=DType.bfloat16, rollout__dtype=DType.bfloat16)


def gigabytes(memory: Memory, where: str = "device") -> dict[str, float]:
    return {part.name: part.num_bytes / 1e9 for part in getattr(memory, where)}


def rank(**keys: Any) -> dict[str, float]:
    return gigabytes(rank_memory(changed(CONFIG, **keys), BILLION, "cuda"))


def test_a_rank_has_its_share_of_weights_and_moments_and_whole_gradients_while_they_fit() -> None:
    found = rank()
    assert (found["weights"], found["moments"], found["gradients, whole"]) == (1.0, 2.0, 4.0)
    assert found["gathered weights"] == 0.6  # 0.3 billion in bfloat16
    sharded = rank(trainer__unsharded_gradients_mb=100)
    assert (sharded["gradients"], sharded["gathered gradients"]) == (1.0, pytest.approx(6 * 0.25))


def test_keys_move_memory_to_the_host() -> None:
    keys = {"trainer__optimizer_on_host": True, "trainer__gradient_checkpointing": GradientCheckpointing.full}
    config = changed(CONFIG, checkpoint__every=0, **keys)
    memory = rank_memory(changed(config, trainer__activation_offload=True), BILLION, "cuda")
    assert "moments" not in gigabytes(memory)
    host = gigabytes(memory, "host")
    tokens = CONFIG.trainer.tokens_per_micro_batch
    assert host == {"moments": 2.0, "offloaded activations": tokens * 16 * 2048 * 2 / 1e9}
    kept = gigabytes(rank_memory(config, BILLION, "cuda"))["activations"] - gigabytes(memory)["activations"]
    assert kept == pytest.approx(tokens * 14 * 2048 * 2 / 1e9)


def test_old_versions_are_kept_in_host_memory() -> None:
    """0.25 billion parameters a rank in bfloat16, and once in float32 while one of them is computed with."""
    config = changed(CONFIG, checkpoint__every=0, algorithm__proximal=Proximal.exact)
    host = gigabytes(rank_memory(changed(config, rollout__max_staleness=8), BILLION, "cuda"), "host")
    assert host == {"old versions": 8 * 0.5 + 1}
    every_second = changed(config, rollout__max_staleness=8, weight_sync__interval=2)
    assert gigabytes(rank_memory(every_second, BILLION, "cuda"), "host") == {"old versions": 9 * 0.5 + 1}
    assert (
        gigabytes(rank_memory(changed(config, rollout__max_staleness=0), BILLION, "cuda"), "host")["old versions"] == 0
    )


def test_fewer_activations_are_kept_the_more_is_recomputed() -> None:
    none, selective, full = (rank(trainer__gradient_checkpointing=how)["activations"] for how in GradientCheckpointing)
    assert full < 0.2 * none and 0.35 * none < selective < 0.7 * none


def test_activations_are_of_the_longest_row_if_it_is_more_than_a_micro_batch() -> None:
    tokens = CONFIG.trainer.tokens_per_micro_batch
    longer = rank(rollout__max_response_tokens=3 * tokens - CONFIG.data.max_prompt_tokens)
    assert longer["activations"] == pytest.approx(3 * rank()["activations"])


def test_an_adapter_leaves_the_weights_frozen_and_trains_its_factors() -> None:
    found = rank(model__lora__rank=8)
    factors = 8 * (4096 + 10240) / 1e9
    assert (found["frozen weights"], found["weights"]) == (0.5, pytest.approx(factors * 4 / 4))
    assert found["moments"] == pytest.approx(factors * 8 / 4)


KEEP_ALL = GradientCheckpointing.none
# Four fifths of the billion, and of each layer.
MIXED = replace(
    BILLION,
    layer=replace(LAYER, experts=8),
    mixture=Mixture(num_experts=128, per_token=8, num_parameters=8 * 10**8, layer_parameters=40 * 10**6, widths=10**6),
)


def mixed(**keys: Any) -> dict[str, float]:
    keys = {"trainer__gradient_checkpointing": GradientCheckpointing.full} | keys
    return gigabytes(rank_memory(changed(CONFIG, **keys), MIXED, "cuda"))


def test_divided_experts_are_not_gathered_and_have_a_share_of_the_gradients() -> None:
    divided, gathered = mixed(trainer__expert_parallel=True), mixed()
    assert (divided["weights"], divided["moments"]) == (gathered["weights"], gathered["moments"])
    assert gathered["gathered weights"] - divided["gathered weights"] == pytest.approx(2 * 0.04 * 2)
    assert divided["gradients, whole"] == pytest.approx(4 * (0.2 + 0.8 / 4))
    at_work = divided["own experts at work"]
    assert at_work == pytest.approx(0.04 / 4 * (2 + 2 + 4)) and "own experts at work" not in gathered
    every_layer = mixed(trainer__expert_parallel=True, trainer__gradient_checkpointing=KEEP_ALL)
    assert every_layer["own experts at work"] - at_work == pytest.approx((0.8 - 0.04) / 4 * 2)
    fits, most = {"trainer__expert_parallel": True}, 1000  # of 0.8 GB, where all would be 4 GB
    assert "gradients" in mixed(trainer__unsharded_gradients_mb=most)
    assert "gradients, whole" in mixed(trainer__unsharded_gradients_mb=most, **fits)
    adapted = mixed(model__lora__rank=8, model__lora__targets=["q_proj", "experts"])
    assert adapted["weights"] == pytest.approx(8 * (4096 + 10**6) * 4 / 4 / 1e9)
    assert adapted["experts with adapters merged"] == pytest.approx(0.04 * (8 + 2))
    none = mixed(model__lora__rank=8, model__lora__targets=["experts"], trainer__gradient_checkpointing=KEEP_ALL)
    assert none["experts with adapters merged"] == pytest.approx(0.04 * 8 + 0.8 * 2), "each layer's, until backward"
    frozen = mixed(model__lora__rank=8, **fits)
    assert frozen["own experts at work"] == pytest.approx(0.04 / 4 * 2)


def test_what_sampling_kept_and_routes_take_memory_of_a_micro_batch() -> None:
    tokens = CONFIG.trainer.tokens_per_micro_batch
    assert not {"routes", "what sampling kept, at most"} & rank().keys()
    assert mixed()["routes"] == tokens * 16 * 8 * 2 / 1e9
    assert "routes" not in mixed(model__replay_routes=False)
    bits = 2**26 / 1e9  # of the logits of a chunk
    assert rank(rollout__top_k=20)["what sampling kept, at most"] == pytest.approx(bits + tokens * 36 * 16 / 1e9)
    assert rank(rollout__top_p=0.9)["what sampling kept, at most"] == pytest.approx(bits + tokens * 528 * 16 / 1e9)


def test_the_plan_says_what_travels_with_the_tokens() -> None:
    assert travel_parts(CONFIG, BILLION) == travel_parts(CONFIG, None) == {}
    keys = {"rollout__max_response_tokens": 1000, "data__max_prompt_tokens": 500, "algorithm__group_size": 8}
    config = changed(CONFIG, trainer__prompts_per_step=4, rollout__max_staleness=1, **keys)
    routes = travel_parts(config, MIXED)["travels"]
    step = 4 * (8 * 1000 * (9 + 128) + 500 * 128)
    assert routes == (
        "9 bytes of every sampled token, 128 of routes, those of a prompt once for its group: "
        f"at most {step / 2**20:.1f} MiB a step, and {2 * step / 2**20:.1f} MiB of host memory on the driver"
    )
    assert (
        "at most 2,116 of what sampling kept: at most"
        in travel_parts(changed(config, rollout__top_p=0.9), None)["travels"]
    )
    wide = replace(MIXED, mixture=replace(MIXED.mixture, num_experts=512))  # pyright: ignore
    assert "256 of routes" in travel_parts(config, wide)["travels"]


def test_reference_and_critic_and_what_an_update_keeps() -> None:
    keys = {"algorithm__kl_loss_coef": 0.1, "algorithm__advantage": "gae", "weight_sync__delta": True}
    found = rank(**keys)
    assert (found["reference"], found["critic"], found["published weights"]) == (0.5, 7.0, 0.5)


def test_a_worker_of_a_replica() -> None:
    config = changed(CONFIG, rollout__tensor_parallel_size=2, rollout__kv_cache_mb=1024)
    memory = replica_worker_memory(config, BILLION, "cuda")
    assert gigabytes(memory) == {"weights": 1.0, "KV cache": 1024 * 2**20 / 1e9}
    assert gigabytes(memory, "host") == {"staging": 1.0}
    assert kv_tokens(config, BILLION, memory) == 2**30 // (2 * 16 * 512 * 2 // 2)
    on_device = replica_worker_memory(changed(config, weight_sync__staging=Staging.device), BILLION, "cuda")
    assert gigabytes(on_device)["staging"] == 1.0 and on_device.host == ()
    by_share = changed(config, rollout__kv_cache_mb=None, rollout__gpu_memory_utilization=0.5)
    assert total(replica_worker_memory(by_share, BILLION, "cuda", 80 * GIB).device) == 40 * GIB


def test_a_worker_of_the_teacher() -> None:
    """Its distributions are of a whole vocabulary, wherever its weights are."""
    keys = {"teacher__tensor_parallel_size": 2, "teacher__kv_cache_mb": 1024, "teacher__max_num_batched_tokens": 4000}
    memory = teacher_worker_memory(changed(CONFIG, teacher__dtype=DType.bfloat16, **keys), BILLION, "cuda")
    of_words = 4000 * BILLION.head_parameters / LAYER.hidden * 6 / 1e9
    assert gigabytes(memory) == {"weights": 1.0, "KV cache": 1024 * 2**20 / 1e9, "distributions": of_words}
    assert memory.host == ()


def test_a_teacher_that_cannot_fit_is_refused() -> None:
    here = Machine(gpu=24 * GIB, host=30 * GIB, shared=None)
    config = changed(CONFIG, teacher__num_replicas=2, teacher__kv_cache_mb=30 * 1024)
    assert refusals(config, BILLION, "cuda", here) == []
    (found,) = refusals(config, BILLION, "cuda", here, BILLION)
    assert found.startswith("teacher.kv_cache_mb: a GPU of the teacher's needs 34.5 GiB")
    shared = changed(
        config, teacher__num_replicas=1, teacher__kv_cache_mb=8 * 1024, gpu_share=0.3, trainer__num_ranks=1
    )
    large = replace(here, gpu=28 * GIB)
    assert refusals(shared, BILLION, "cuda", large) == []
    (found,) = refusals(shared, BILLION, "cuda", large, BILLION)
    assert found.startswith("teacher.kv_cache_mb: a GPU of a rank, a replica and the teacher needs 34.2 GiB")
    (found,) = refusals(changed(config, trainer__num_ranks=1), BILLION, "cpu", replace(here, gpu=None), BILLION)
    assert found.startswith("teacher.kv_cache_mb: 1 train worker(s) and 1 of replicas and 2 of the teacher need host")


@pytest.mark.parametrize(
    ("keys", "machine", "expected"),
    [
        ({}, {"gpu": 80 * GIB, "host": 500 * GIB, "shared": 80 * GIB}, []),
        ({"trainer__num_ranks": 1}, {"gpu": 12 * GIB}, ["trainer.optimizer_on_host: a train worker's GPU needs"]),
        ({"rollout__kv_cache_mb": 40000}, {"gpu": 24 * GIB}, ["rollout.kv_cache_mb: a replica's GPU needs 40.9 GiB"]),
        ({"checkpoint__every": 10}, {"host": 10 * GIB}, ["checkpoint.every: 4 train worker(s) and 1 of replicas need"]),
        ({}, {"shared": GIB}, ["weight_sync.transport=shared_memory: needs 1.9 GiB in /dev/shm, 1.0 GiB are free"]),
        ({"weight_sync__transport": Transport.collective}, {"shared": GIB}, []),
        ({"trainer__num_ranks": 1}, {}, []),
    ],
)
def test_what_cannot_fit_is_refused_with_the_key_of_the_largest_part(
    keys: dict[str, Any], machine: dict[str, float], expected: list[str]
) -> None:
    here = Machine(**{"gpu": None, "host": None, "shared": None, **machine})
    found = refusals(changed(CONFIG, **keys), BILLION, "cuda", here)
    assert len(found) == len(expected)
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True))


def test_on_a_shared_gpu_both_must_fit() -> None:
    config = changed(CONFIG, trainer__num_ranks=1, gpu_share=0.5, rollout__kv_cache_mb=4096)
    alone = max(
        total(m.device) for m in (rank_memory(config, BILLION, "cuda"), replica_worker_memory(config, BILLION, "cuda"))
    )
    here = Machine(gpu=alone, host=None, shared=None)
    assert refusals(changed(config, gpu_share=1.0), BILLION, "cuda", here) == []
    assert refusals(config, BILLION, "cuda", here)[0].startswith("trainer.optimizer_on_host: a GPU of a rank and a rep")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_keeps_what_autograd_saves(dtype: torch.dtype) -> None:
    """The estimate leaves out rotations, and each head's sum in attention."""
    shape = model_shape(Config())
    assert shape is not None and shape.layer is not None
    model: Any = build_model(448, seed=0)
    model.to(dtype)
    of_weights = {parameter.data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}
    kept = []

    def watch(tensor: Tensor) -> Tensor:
        kept.append(tensor)  # so that no other gets its address
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    layer: Any = model.model.layers[1]
    forward = layer.forward

    def watched(*args: Any, **given: Any) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(watch, lambda tensor: tensor):
            return forward(*args, **given)

    layer.forward = watched
    ids = torch.zeros(2, 40, dtype=torch.int64)
    model(input_ids=ids, use_cache=False)
    expected = ids.numel() * layer_bytes(shape.layer, dtype.itemsize)
    assert expected <= sum(saved.values()) < 1.06 * expected
