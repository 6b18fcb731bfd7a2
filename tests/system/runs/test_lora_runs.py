"""A run that trains an adapter, with real vLLM: what travels, what is sampled from, what is saved."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.adapters import write_quantized
from tests.support.whole_runs import END_DEADLINE_S, START_DEADLINE_S, check_tokens, exported, small, started, steps_of

RANK = 4


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_replicas_serve_the_weights_with_the_adapter_and_are_sent_the_adapter(tmp_path: Path, tiny_model: Path) -> None:
    """Two steps on policy: every token of the second was sampled by merged weights. Nothing is held out."""
    job = [
        *(word for word in small(tiny_model) if not word.startswith("data.num_val")),
        *("trainer.total_steps=2", "data.val_files=none", "trainer.lr=0.05", "trainer.lr_warmup_steps=1"),
        *("rollout.max_staleness=0", "checkpoint.every=2", f"model.lora.rank={RANK}"),
    ]
    with started(tmp_path, *job) as run:
        assert run.wait_for_end(START_DEADLINE_S + END_DEADLINE_S) == 0, run.output.read_text()
    assert check_tokens(run.run_dir).evaluations == 0
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["accuracy_before"], summary["accuracy_after"], summary["evaluation_requests"]) == (None, None, 0)
    assert "finished: not evaluated, after 2 steps" in run.output.read_text()
    steps = steps_of(run.run_dir)
    assert [record["step"] for record in steps] == [1, 2]
    for record in steps:
        assert record["actor/grad_norm"] > 0
        assert record["actor/rollout_logprob_diff_max"] < 1e-4
    exported(run.run_dir, tmp_path / "adapter", "--adapter")
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    num_bytes = sum(4 * factor.numel() for factor in factors.values())
    assert [record["weight_sync/megabytes"] for record in steps] == pytest.approx([num_bytes / 1e6] * 2)
    assert all(factor.any() for factor in factors.values()), "every B has learned"
    exported(run.run_dir, tmp_path / "merged")
    merged, first = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", tiny_model))
    changed = {name for name, weight in first.items() if not weight.equal(merged[name])}
    assert changed == {name for name in first if name.endswith("_proj.weight")}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("quantized", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_replicas_serve_the_adapter_beside_weights_of_their_own(
    quantized: bool, tmp_path: Path, tiny_model: Path
) -> None:
    """Drafting n-grams. Of the same weights, the logprobs are the trainer's; of 8-bit ones, they differ by what the
    quantization makes of them, which is measured as staleness is."""
    job = [
        *small(tiny_model),
        *("trainer.total_steps=3", "trainer.eval_every=0", "trainer.lr=0.05", "trainer.lr_warmup_steps=1"),
        *("rollout.max_staleness=1", "checkpoint.every=0", f"model.lora.rank={RANK}", "model.lora.serve=adapter"),
        *("rollout.speculative.method=ngram", "rollout.speculative.min_match=1"),
    ]
    if quantized:
        write_quantized(tiny_model, tmp_path / "int8")
        job.append(f"model.lora.served_path={tmp_path / 'int8'}")
    with started(tmp_path, *job) as run:
        assert run.wait_for_end(START_DEADLINE_S + END_DEADLINE_S) == 0, run.output.read_text()
    check_tokens(run.run_dir)
    steps = steps_of(run.run_dir)
    assert [record["step"] for record in steps] == [1, 2, 3]
    for record in steps:
        assert record["actor/grad_norm"] > 0 and 0 < record["rollout/spec_acceptance"] < 1
        assert record["weight_sync/megabytes"] < 0.1, "the first update does not bring the weights either"
    first = steps[0]["actor/rollout_logprob_diff_max"]
    if quantized:  # the largest of a thousand sampled tokens says less than their mean: it was 0.3 to 0.6 nats
        assert 1e-3 < first < 2 and abs(steps[0]["actor/rollout_kl"]) < 0.03
    else:
        assert first < 1e-5
    assert all(record["correction/k3_kl"] > 0 for record in steps)
