"""The recipe `search_world`: a model made here searches a made-up world, and what it wrote is trained."""

from pathlib import Path

import pytest

from tests.support.whole_runs import SIZES, started
from trainer.tracking.audit import audit
from trainer.tracking.sinks import read_metrics

STEPS = 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_episodes_of_searches_and_answers_are_trained(tmp_path: Path) -> None:
    """The warm-up is a tenth of the recipe's: the model has learned to search, not for what."""
    short = ["model.warmup_steps=80", f"model.cache_dir={tmp_path / 'cache'}", f"trainer.total_steps={STEPS}"]
    with started(tmp_path, "model=chat", "recipe=search_world", *SIZES, *short) as run:
        assert run.wait_for_end(600) == 0, run.output.read_text()
        assert audit(run.run_dir).findings == ()
        metrics = read_metrics(run.run_dir / "metrics.jsonl")
        assert [record["step"] for record in metrics if "eval/accuracy" in record] == [0, STEPS]
        steps = [record for record in metrics if "critic/rewards/mean" in record]
        assert len(steps) == STEPS
        for record in steps:
            assert record["agent/searches"] > 0 and record["agent/turns"] > 1
            assert 0 < record["agent/retrieval_ms"] < 1000
