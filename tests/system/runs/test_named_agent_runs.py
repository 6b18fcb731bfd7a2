"""Runs with agents that nobody here wrote, by their names, while the weights change with every step."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from configs.named_agents import NAMED_AGENTS
from scripts.plan.agent_trial import say_call
from tests.support.agent_installs import INSTALLS, path_with
from tests.support.saying_models import check_reading, write_saying_model
from tests.support.whole_runs import check_tokens, small, started, trained

STEPS, GROUP_SIZE = 3, 2
SIZES = f"""
trainer.total_steps={STEPS} trainer.prompts_per_step=1 algorithm.group_size={GROUP_SIZE} trainer.eval_every=0
data.num_val=1 rollout.max_response_tokens=2048 rollout.max_num_seqs=8 rollout.max_staleness=1
rollout.max_failed_rewards=0 sessions.max_turn_tokens=16 sessions.max_turns=32
""".split()
WORK, SEEN = "echo seen $((6 * 7))", "seen 42"
"""A command, and what the policy reads of it and of nothing else."""
LAST_WORDS = "It is done."


@dataclass(frozen=True)
class Case:
    work: str
    """The answer in which the policy works."""
    end: str = LAST_WORDS
    """The answer that ends an episode."""
    other_rows: int = 0
    """The sequences of an episode besides that of its conversation."""


CASES: Mapping[str, Case] = {
    "claude_code": Case(say_call("Bash", {"command": WORK, "description": "Look"})),
    "codex": Case(say_call("exec_command", {"cmd": WORK})),
    "opencode": Case(say_call("bash", {"command": WORK, "description": "Look"}), other_rows=1),  # a title
    "mini_swe_agent": Case(
        say_call("bash", {"command": WORK}),
        end=say_call("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "name",
    [
        "claude_code",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("codex", "opencode", "mini_swe_agent")),
    ],
)
def test_an_agent_is_trained_on_what_was_sampled(name: str, tmp_path: Path) -> None:
    """The policy works or ends its episode in each turn, by chance; in an evaluation it ends it at once."""
    case, agent = CASES[name], NAMED_AGENTS[name]
    if (reason := INSTALLS[name.replace("_", "-")].reason_to_skip()) is not None:
        pytest.skip(reason)
    model = write_saying_model(tmp_path / "model", [case.end, case.work], agent.context)
    path = path_with(agent, tmp_path / "bin")
    keys = [f"rollout.agent={name}", f"data.max_prompt_tokens={agent.context - 2048}"]
    with started(tmp_path, *small(model), *SIZES, *keys, PATH=path) as run:
        assert run.wait_for_end(900) == 0, run.output.read_text()
        check_tokens(run.run_dir)
        records = [record for step in trained(run) for record in step]
        assert len(records) == STEPS * GROUP_SIZE
        for record in records:
            metrics, sequences = record["agent_metrics"], record["sequences"]
            assert metrics["refused_requests"] == 0
            assert len(sequences) == 1 + case.other_rows
            for sequence in sequences:
                assert sequence["loss_tokens"] == sum(end - start for start, end, _ in sequence["versions"]) > 0
        check_reading(run, model, case.work, SEEN)
        spans = (span for record in records for sequence in record["sequences"] for span in sequence["versions"])
        assert len({version for _, _, version in spans}) >= 2, "the weights changed under the sessions"
