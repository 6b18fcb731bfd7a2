"""A run of a mixture of experts: every token is trained through the experts that sampled it, and trained again from the
records."""

from pathlib import Path

import pytest

from tests.support.families import random_model
from tests.support.whole_runs import (
    START_DEADLINE_S,
    check_replay,
    check_tokens,
    check_training,
    small,
    started,
    steps_of,
)
from trainer.tiny import model as tiny

STEPS = 3
RUN = [
    *("rollout.max_staleness=2", "algorithm.proximal=exact", "algorithm.kl_loss_coef=0.01"),
    *("trainer.num_ranks=2", "trainer.lr=3e-3", "trainer.lr_warmup_steps=0"),
    *(f"trainer.total_steps={STEPS}", "trainer.eval_every=0", "checkpoint.every=0", "model.replay_routes=true"),
]
IN_FLOAT32 = 2e-5
"""The largest difference in nats of one token."""


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tiny.build_tokenizer(["Question: Tom has 3 pens and buys 4 more.\nAnswer: 3+4=7\n#### 7"] * 4)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 64, "head_dim": 32, "num_hidden_layers": 2}
    model = random_model("qwen3_moe", **sizes, max_position_embeddings=2048, initializer_range=0.1)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    folder = tmp_path_factory.mktemp("models") / "experts"
    tiny.write_model_directory(folder, model, tokenizer)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_token_is_trained_through_the_experts_that_sampled_it(tmp_path: Path, experts: Path) -> None:
    with started(tmp_path, *small(experts), *RUN) as run:
        assert run.wait_for_end(2 * START_DEADLINE_S) == 0, run.output.read_text()
    for step in steps_of(run.run_dir):
        assert step["mismatch/logprob_diff_max"] < IN_FLOAT32, step
        assert step["rollout/routed_fraction"] == 1 and step["rollout/route_megabytes"] > 0
    check_training(run, STEPS)
    check_tokens(run.run_dir)
    check_replay(run.run_dir, STEPS)
