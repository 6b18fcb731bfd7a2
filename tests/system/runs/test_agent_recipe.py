"""The recipe `agent`: a model made here calls a calculator through the gateway, and what it said is trained."""

from pathlib import Path

import pytest

from tests.support.whole_runs import SIZES, started
from trainer.tracking.audit import audit
from trainer.tracking.sinks import read_metrics

STEPS = 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_conversations_with_tools_are_one_sequence_each_and_trained(tmp_path: Path) -> None:
    """The warm-up is a tenth of the recipe's: the model has learned to call the tool, not with which numbers."""
    short = ["model.warmup_steps=60", f"model.cache_dir={tmp_path / 'cache'}", f"trainer.total_steps={STEPS}"]
    with started(tmp_path, "model=chat", "recipe=agent", *SIZES, *short) as run:
        assert run.wait_for_end(600) == 0, run.output.read_text()
        assert audit(run.run_dir).findings == ()
        metrics = read_metrics(run.run_dir / "metrics.jsonl")
        assert [record["step"] for record in metrics if "eval/accuracy" in record] == [0, STEPS]
        steps = [record for record in metrics if "critic/rewards/mean" in record]
        assert len(steps) == STEPS
        for record in steps:
            assert record["agent/turns"] > 1, "it calls the calculator, and goes on from the result"
            assert record["agent/sequences"] == record["agent/delivered_fraction"] == 1
            assert record["agent/merged_fraction"] == 1
