"""The benchmark of the trainer in its tiny form, and how it counts memory."""

import asyncio

import pytest
import torch

from scripts.bench import trainer
from scripts.bench.trainer import PackingShape, Shape, measure_logprobs, measure_packing
from trainer.worker.counted_memory import Memory


def test_both_ways_give_the_same_gradient_and_one_takes_less_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(tokens=1000, vocabulary=3000, hidden=8)
    monkeypatch.setattr(trainer, "MAX_LOGITS", 300 * shape.vocabulary)
    figures = asyncio.run(measure_logprobs(shape, Shape(tokens=20, vocabulary=50, hidden=8), repeats=1))
    assert 0 < figures["logprobs_difference_ppm"] < 20
    assert figures["logprobs_gb_dense"] > 3 * 4 * shape.tokens * shape.vocabulary / 1e9
    assert figures["logprobs_gb_fused"] < 0.8 * figures["logprobs_gb_dense"]
    assert figures["logprobs_gb_checkpointed"] < 0.5 * figures["logprobs_gb_dense"]
    assert "checkpointed" in capsys.readouterr().out


def test_packed_sequences_have_no_padding() -> None:
    shape = PackingShape(sequences=6, response=12, longest=40, tokens_per_micro_batch=160, hidden=32, layers=1)
    figures = asyncio.run(measure_packing(shape, repeats=1))
    assert figures["packing_padding_share_packed"] == 0 < figures["packing_padding_share_rows"] < 1
    assert figures["packing_speedup"] > 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_is_of_what_is_alive_at_once(device: str) -> None:
    before = torch.ones(1000, device=device)
    with Memory() as memory:
        for _ in range(5):
            view = (before + 1)[:10]
            del view
        kept = before.repeat(3)
        kept.view(-1).mul_(2)
        kept[:500].clone()
    assert (memory.largest, memory.peak) == (12_000, 14_000)
