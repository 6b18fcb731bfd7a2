"""A run that trains agents of two frameworks while its weights change with every step: they stream, and call tools."""

from pathlib import Path

import pytest

from scripts.observe.audit import audit
from tests.support.whole_runs import started, steps_of, trained

STEPS = 3
RUN = f"""
model=chat recipe=agent device=cpu rollout.agent=tests.support.frameworks:both model.warmup_steps=450 data.num_val=4
trainer.total_steps={STEPS} trainer.prompts_per_step=4 trainer.eval_every=0
rollout.max_num_seqs=16 rollout.max_staleness=1 rollout.max_failed_rewards=0
""".split()


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_agents_of_two_frameworks_are_trained_on_what_was_sampled(tmp_path: Path) -> None:
    with started(tmp_path, *RUN) as run:
        assert run.wait_for_end(1100) == 0, run.output.read_text()
        assert audit(run.run_dir).findings == ()
        records = [record for step in trained(run) for record in step]
        versions = {version for one in records for row in one["sequences"] for _, _, version in row["versions"]}
        assert len(versions) >= 2, "the weights changed under the sessions"
        for record in records:
            (sequence,) = record["sequences"]
            assert sequence["loss_tokens"] == sum(end - start for start, end, _ in sequence["versions"]) > 0
            assert record["agent_metrics"]["merged_fraction"] == record["agent_metrics"]["delivered_fraction"] == 1
        ended = [record for record in records if record["finish_reason"] == "stop"]  # by themselves, not at a limit
        assert len(ended) > len(records) / 2
        for framework in (0, 1):
            own = [one["reward_metrics"] for one in ended if one["reward_metrics"]["openai"] == framework]
            assert sum(one["tool_calls"] for one in own) > len(own), "more than one call each, on average"
            assert all(one["streamed"] >= 1 for one in own)
        (first, *later) = steps_of(run.run_dir, "actor/rollout_kl")
        assert len(later) == STEPS - 1
        assert abs(first["actor/rollout_kl"]) < 1e-3, "the trainer computes the logprobs that the replica sampled with"
