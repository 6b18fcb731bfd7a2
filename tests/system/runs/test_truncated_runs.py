"""Runs whose sampling leaves tokens out: the trainer computes what vLLM drew from, and the records give it again."""

from pathlib import Path

import pytest

from tests.support.whole_runs import (
    START_DEADLINE_S,
    check_replay,
    check_tokens,
    check_training,
    small,
    started,
    steps_of,
)

STEPS = 4
RUN = [
    *("rollout.top_p=0.9", "rollout.top_k=20", "rollout.temperature=0.8", "algorithm.kl_loss_coef=0.01"),
    *("trainer.lr=3e-3", "trainer.lr_warmup_steps=0"),
    *(f"trainer.total_steps={STEPS}", "trainer.eval_every=0", "checkpoint.every=0"),
]
IN_FLOAT32 = 1e-5
"""The largest difference in nats of one token. Over the whole vocabulary it would be 0.1 and more."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("overrides", "difference"),
    [
        pytest.param(
            ["rollout.max_staleness=0"], "actor/rollout_logprob_diff_max", id="on policy", marks=pytest.mark.nightly
        ),
        pytest.param(
            [
                *("rollout.max_staleness=2", "algorithm.proximal=exact", "weight_sync.pause_mode=abort"),
                *("trainer.num_ranks=2", "trainer.layout=packed"),
            ],
            "mismatch/logprob_diff_max",
            id="exact old logits of requests that updates abort",
        ),
    ],
)
def test_trainer_and_engine_agree_on_every_token(
    overrides: list[str], difference: str, tmp_path: Path, tiny_model: Path
) -> None:
    with started(tmp_path, *small(tiny_model), *RUN, *overrides) as run:
        assert run.wait_for_end(2 * START_DEADLINE_S) == 0, run.output.read_text()
    steps = steps_of(run.run_dir)
    for step in steps:
        assert step[difference] < IN_FLOAT32, step
        assert 1 < step["rollout/kept_tokens"] <= step["rollout/kept_tokens_max"] <= 20
        assert step["rollout/unknown_kept"] == 0
    assert abs(steps[0]["actor/kl_loss"]) < 1e-7, "the reference is the first policy, over the same tokens"
    check_training(run, STEPS)
    check_tokens(run.run_dir)
    check_replay(run.run_dir, STEPS)
