"""A run that trains a mixture of experts, with real vLLM: what is made, what samples and what is saved."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.whole_runs import (
    END_DEADLINE_S,
    SIZES,
    START_DEADLINE_S,
    check_tokens,
    check_training,
    exported,
    started,
    steps_of,
)
from trainer.checkpoint.store import checkpoint_at
from trainer.worker.state import policy_weights

NUM_EXPERTS = 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replicas_sample_from_the_experts_that_are_trained(tmp_path: Path) -> None:
    """Three steps on policy: the tokens of the second and third were sampled by experts that an update has brought. The
    export has the checkpoint's bits."""
    job = [
        *(word for word in SIZES if not word.startswith("data.num_val")),
        *(f"model.num_experts={NUM_EXPERTS}", "model.warmup_steps=20", f"model.cache_dir={tmp_path / 'cache'}"),
        *("trainer.total_steps=3", "data.val_files=none", "rollout.max_staleness=0", "checkpoint.every=3"),
        "rollout.reward=tests.support.rewards:length_parity",
    ]
    with started(tmp_path, *job) as run:
        assert run.wait_for_end(START_DEADLINE_S + END_DEADLINE_S) == 0, run.output.read_text()
    check_training(run, 3)
    assert check_tokens(run.run_dir).evaluations == 0
    steps = steps_of(run.run_dir)
    assert [record["step"] for record in steps] == [1, 2, 3]
    for record in steps:
        assert record["actor/grad_norm"] > 0
        assert record["actor/rollout_logprob_diff_max"] < 1e-4
    model = AutoModelForCausalLM.from_pretrained(exported(run.run_dir, tmp_path / "exported"), dtype=torch.float32)
    assert type(model).__name__ == "Qwen3MoeForCausalLM" and model.config.num_experts == NUM_EXPERTS
    weights, saved = model.state_dict(), policy_weights(checkpoint_at(run.run_dir).train_folder)
    first = AutoModelForCausalLM.from_pretrained(run.run_dir / "initial_model", dtype=torch.float32).state_dict()
    for name, weight in saved.items():
        assert torch.equal(weights[name], weight), name
        assert not torch.equal(first[name], weight), f"{name} has not learned"
