"""The memory of a rank is what real steps take: within 15% as a dry run computes it, within 10% as it is rehearsed."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from configs.schema import Config, ModelKind
from scripts.bench.gpu_parts import full_batch
from scripts.plan.machine import format_bytes, list_parts
from scripts.plan.memory import rank_memory, total
from scripts.plan.model_shape import model_shape
from scripts.plan.rehearsal.rehearsal import rehearse
from tests.support.compose import changed
from tests.support.peak_memory import peak_bytes, trainer_config
from trainer.batch import StepBatch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TIMEOUT_S = 600.0
MANY_WEIGHTS: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
MANY_TOKENS: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12}


def saved(folder: Path, **sizes: Any) -> Path:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    config = Qwen3Config(vocab_size=8192, tie_word_embeddings=True, pad_token_id=0, **heads, **sizes)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("sizes", "keys"),
    [
        pytest.param(MANY_WEIGHTS, {"num_ranks": 1, "tokens_per_micro_batch": 256}, marks=pytest.mark.nightly),
        (MANY_WEIGHTS, {"num_ranks": 2, "tokens_per_micro_batch": 256, "unsharded_gradients_mb": 10}),
        pytest.param(MANY_TOKENS, {"num_ranks": 1}, marks=pytest.mark.nightly),
        pytest.param(MANY_TOKENS, {"num_ranks": 2, "gradient_checkpointing": "selective"}, marks=pytest.mark.nightly),
        pytest.param(MANY_TOKENS, {"num_ranks": 1, "gradient_checkpointing": "full"}, marks=pytest.mark.nightly),
    ],
)
def test_a_rank_takes_what_the_plan_says(sizes: dict[str, Any], keys: dict[str, Any], tmp_path: Path) -> None:
    tiny = saved(tmp_path / "tiny", hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    model = saved(tmp_path / "model", **sizes)
    config = changed(Config(trainer=trainer_config({"tokens_per_micro_batch": 2048, **keys})), checkpoint__every=0)
    config = changed(config, data__max_prompt_tokens=128, rollout__max_response_tokens=128)
    shape = model_shape(changed(config, model__kind=ModelKind.hf, model__path=str(model)))
    assert shape is not None
    parts = rank_memory(config, shape, "cpu").host
    found = peak_bytes(tmp_path, (tiny, model), {"tokens_per_micro_batch": 2048, **keys}, TIMEOUT_S)
    rows = full_batch(config.trainer.tokens_per_micro_batch // 256, 256)
    step = StepBatch(micro_batches=((rows, rows),) * keys["num_ranks"], optimizer_steps=(range(2),), num_tokens=0)
    rehearsed = rehearse(config, "cpu", str(model), step).peak
    print(f"{keys}: measured {format_bytes(found)}, computed {format_bytes(total(parts))} ({list_parts(parts)})")
    print(f"rehearsed {format_bytes(rehearsed['Total'])} ({rehearsed})")
    assert found == pytest.approx(total(parts), rel=0.15)
    assert found == pytest.approx(rehearsed["Total"], rel=0.10)
