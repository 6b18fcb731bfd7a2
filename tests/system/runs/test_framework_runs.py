"""Runs that train agents of frameworks while their weights change with every step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from configs.named_agents import NamedAgent
from scripts.observe.audit import audit
from scripts.plan.agent_trial import say_call
from tests.support.agent_installs import INSTALLS
from tests.support.framework_programs import OPENAI_AGENTS, PYDANTIC_AI, ai_sdk, documented, python
from tests.support.saying_models import check_reading, write_saying_model
from tests.support.whole_runs import check_tokens, small, started, steps_of, trained

STEPS = 3
RUN = f"""
model=chat recipe=agent device=cpu rollout.agent=tests.support.frameworks:both model.warmup_steps=450 data.num_val=4
trainer.total_steps={STEPS} trainer.prompts_per_step=4 trainer.eval_every=0
rollout.max_num_seqs=16 rollout.max_staleness=1 rollout.max_failed_rewards=0
""".split()


WORK, SEEN = say_call("calculator", {"left": 6, "right": 9}), "54"
"""A call, and what the policy reads of it and of nothing else."""
CONTEXT = 12_000
PLAIN = PYDANTIC_AI.replace(", output_type=Number", "").replace(".output.value", ".output")
Make = Callable[[Path], NamedAgent]


@dataclass(frozen=True)
class Case:
    programs: Mapping[str, Make]
    """Each is a source of the run."""
    end: str = "It is done."
    """The answer that ends an episode."""
    only_appends: bool = True


def patient_ai_sdk(folder: Path) -> NamedAgent:
    """It goes on after more calls than the documented one."""
    agent, script = ai_sdk(folder), folder / "agent.mjs"
    script.write_text(script.read_text().replace("stepCountIs(5)", "stepCountIs(30)"))
    return agent


CASES = {
    "four": Case(
        {
            "ai_sdk": patient_ai_sdk,
            "openai_agents": python("openai-agents", OPENAI_AGENTS),
            "pydantic_ai": python("pydantic-ai", PLAIN.replace("API", "openai-responses")),
            "langchain": python("langchain", documented("my_langchain_agent.py")),
        }
    ),
    "smolagents": Case(
        {"smolagents": python("smolagents", documented("my_smolagents_agent.py"))},
        end=say_call("final_answer", {"answer": "done"}),
        only_appends=False,  # it writes the policy's calls anew
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", ["four", pytest.param("smolagents", marks=pytest.mark.nightly)])
def test_programs_of_frameworks_are_trained_on_what_was_sampled(name: str, tmp_path: Path) -> None:
    """The policy calls the calculator or ends its episode in each turn, by chance."""
    case, steps, group_size = CASES[name], 3, 2
    for program in case.programs:
        if (reason := INSTALLS[program.replace("_", "-")].reason_to_skip()) is not None:
            pytest.skip(reason)
    model = write_saying_model(tmp_path / "model", [case.end, WORK], CONTEXT)
    keys = f"""
    trainer.total_steps={steps} trainer.prompts_per_step={len(case.programs)} algorithm.group_size={group_size}
    trainer.eval_every=0 data.num_val=1 data.max_prompt_tokens={CONTEXT - 2048} rollout.max_response_tokens=2048
    rollout.max_num_seqs=8 rollout.max_staleness=1 rollout.max_failed_rewards=0 sessions.max_turn_tokens=16
    """.split()
    for program, make in case.programs.items():
        (folder := tmp_path / program).mkdir()
        command = " ".join(make(folder).argv)
        keys.append(f"+data.sources.{program}.rollout.agent_command='{command}'")
    with started(tmp_path, *small(model), *keys) as run:
        assert run.wait_for_end(900) == 0, run.output.read_text()
        check_tokens(run.run_dir)
        records = [record for step in trained(run) for record in step]
        assert len(records) == steps * group_size * len(case.programs)
        assert {record["source"] for record in records} == set(case.programs)
        for record in records:
            assert record["agent_metrics"]["refused_requests"] == 0
            assert not case.only_appends or len(record["sequences"]) == 1, record["source"]
            for sequence in record["sequences"]:
                assert sequence["loss_tokens"] == sum(end - start for start, end, _ in sequence["versions"]) > 0
        check_reading(run, model, WORK, SEEN)
        spans = (span for record in records for sequence in record["sequences"] for span in sequence["versions"])
        assert len({version for _, _, version in spans}) >= 2, "the weights changed under the sessions"


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
