"""A run of a mixture of experts: every token is trained through the experts that sampled it, and trained again from the
records."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.whole_runs import (
    SIZES,
    START_DEADLINE_S,
    check_replay,
    check_tokens,
    check_training,
    exported,
    started,
    steps_of,
)
from trainer.checkpoint.store import checkpoint_at
from trainer.worker.state import policy_weights

STEPS = 3
NUM_EXPERTS = 4
RUN = [
    *("rollout.max_staleness=2", "algorithm.proximal=exact", "algorithm.kl_loss_coef=0.01"),
    *("trainer.num_ranks=2", "trainer.lr=3e-3", "trainer.lr_warmup_steps=0"),
    *(f"trainer.total_steps={STEPS}", "trainer.eval_every=0", f"checkpoint.every={STEPS}", "model.replay_routes=true"),
    *(f"model.num_experts={NUM_EXPERTS}", "model.warmup_steps=0"),
    "rollout.reward=tests.support.rewards:length_parity",
]
IN_FLOAT32 = 2e-5
"""The largest difference in nats of one token."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_token_is_trained_through_the_experts_that_sampled_it(tmp_path: Path) -> None:
    """The export has the checkpoint's bits, of which every one has learned."""
    with started(tmp_path, *SIZES, *RUN) as run:
        assert run.wait_for_end(2 * START_DEADLINE_S) == 0, run.output.read_text()
    steps = steps_of(run.run_dir)
    for step in steps:
        assert step["mismatch/logprob_diff_max"] < IN_FLOAT32, step
        assert step["rollout/routed_fraction"] == 1 and step["rollout/route_megabytes"] > 0
        assert step["actor/grad_norm"] > 0
    check_training(run, STEPS)
    check_tokens(run.run_dir)
    check_replay(run.run_dir, STEPS)
    model = AutoModelForCausalLM.from_pretrained(exported(run.run_dir, tmp_path / "exported"), dtype=torch.float32)
    assert type(model).__name__ == "Qwen3MoeForCausalLM" and model.config.num_experts == NUM_EXPERTS
    weights, saved = model.state_dict(), policy_weights(checkpoint_at(run.run_dir).train_folder)
    first = AutoModelForCausalLM.from_pretrained(run.run_dir / "untrained_model", dtype=torch.float32).state_dict()
    for name, weight in saved.items():
        assert torch.equal(weights[name], weight), name
        assert not torch.equal(first[name], weight), f"{name} has not learned"
