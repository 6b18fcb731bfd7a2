"""The recipe `reasoning_gym`: problems and judgements of the package, answered by a model made here."""

from pathlib import Path

import pytest

from tests.support.whole_runs import SIZES, started
from trainer.tracking.audit import audit
from trainer.tracking.sinks import read_metrics

STEPS = 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_problems_are_answered_and_trained(tmp_path: Path) -> None:
    """The warm-up is a part of the recipe's: the model has learned to answer in a word, not with which."""
    pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym")
    short = ["model.warmup_steps=60", f"model.cache_dir={tmp_path / 'cache'}", f"trainer.total_steps={STEPS}"]
    with started(tmp_path, "recipe=reasoning_gym", *SIZES, *short) as run:
        assert run.wait_for_end(600) == 0, run.output.read_text()
        assert audit(run.run_dir).findings == ()
        metrics = read_metrics(run.run_dir / "metrics.jsonl")
        evaluations = [record for record in metrics if "eval/accuracy" in record]
        assert [record["step"] for record in evaluations] == [0, STEPS]
        assert "val/chain_sum/avg@1" in evaluations[0]
        steps = [record for record in metrics if "critic/rewards/mean" in record]
        assert len(steps) == STEPS
        assert all(0 <= record["critic/rewards/mean"] <= 1 for record in steps)
