"""Runs with an agent that nobody here wrote, by its name, while the weights change with every step."""

from pathlib import Path

import pytest

from configs.named_agents import NAMED_AGENTS
from tests.support.agent_installs import INSTALLS, path_with
from tests.support.whole_runs import check_tokens, small, started, trained

STEPS = 3
SIZES = f"""
trainer.total_steps={STEPS} trainer.prompts_per_step=2 algorithm.group_size=4 trainer.eval_every=0 data.num_val=4
data.max_prompt_tokens=12288 rollout.max_response_tokens=1024 sessions.max_turn_tokens=16 rollout.max_num_seqs=8
rollout.max_staleness=1 rollout.max_failed_rewards=0 model.max_position_embeddings=16384
""".split()


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_mini_swe_agent_is_trained_on_what_was_sampled(tmp_path: Path, chat_model: Path) -> None:
    """The policy calls nothing, so each episode ends after three answers that the agent complains about."""
    if (reason := INSTALLS["mini-swe-agent"].reason_to_skip()) is not None:
        pytest.skip(reason)
    path = path_with(NAMED_AGENTS["mini_swe_agent"], tmp_path / "bin")
    with started(tmp_path, *small(chat_model), *SIZES, "rollout.agent=mini_swe_agent", PATH=path) as run:
        assert run.wait_for_end(900) == 0, run.output.read_text()
        check_tokens(run.run_dir)
        records = [record for step in trained(run) for record in step]
        assert len(records) == STEPS * 8
        for record in records:
            assert record["agent_metrics"]["refused_requests"] == 0 and record["agent_metrics"]["turns"] >= 3
            for sequence in record["sequences"]:
                assert sequence["loss_tokens"] == sum(end - start for start, end, _ in sequence["versions"]) > 0
        spans = (span for record in records for sequence in record["sequences"] for span in sequence["versions"])
        assert len({version for _, _, version in spans}) >= 2, "the weights changed under the sessions"
