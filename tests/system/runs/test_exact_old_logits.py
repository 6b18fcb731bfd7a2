"""Runs with algorithm.proximal=exact: whatever an update does to requests, the trainer computes what vLLM sampled."""

from pathlib import Path

import pytest

from tests.support.whole_runs import START_DEADLINE_S, check_training, small, started, steps_of

STEPS = 5
RUN = [
    *("algorithm.proximal=exact", "rollout.max_staleness=2", "trainer.lr=3e-3", "trainer.lr_warmup_steps=0"),
    *(f"trainer.total_steps={STEPS}", "trainer.eval_every=0", "checkpoint.every=0"),
]
IN_FLOAT32 = 1e-4
"""The largest difference in nats of one token that two implementations may have in float32. Ten times what was seen,
and a hundredth of what staleness makes of these runs."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["trainer.num_ranks=2"], id="keep", marks=pytest.mark.nightly),
        pytest.param(
            ["weight_sync.in_flight_kv=recompute", "trainer.layout=packed"], id="recompute", marks=pytest.mark.nightly
        ),
        pytest.param(["weight_sync.pause_mode=abort"], id="abort", marks=pytest.mark.nightly),
        pytest.param(["rollout.agent_loop=tests.support.echo:agent_loop"], id="turns"),
    ],
)
def test_engine_and_trainer_agree_on_every_token_under_its_own_version(
    overrides: list[str], tmp_path: Path, tiny_model: Path
) -> None:
    with started(tmp_path, *small(tiny_model), *RUN, *overrides) as run:
        assert run.wait_for_end(2 * START_DEADLINE_S) == 0, run.output.read_text()
    steps = steps_of(run.run_dir)
    assert max(step["staleness/max"] for step in steps) == 2
    for step in steps:
        assert step["mismatch/logprob_diff_max"] < IN_FLOAT32, step
        assert step["staleness/unknown_tokens"] == 0
        assert step["mismatch/kl"] + step["staleness/kl"] == pytest.approx(step["actor/rollout_kl"], abs=1e-6)
    assert max(abs(step["staleness/kl"]) for step in steps) > 10 * IN_FLOAT32
    check_training(run, STEPS)
