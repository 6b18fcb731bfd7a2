"""A policy that learns inside an agent that nobody here wrote, whose commands a sandbox runs."""

import sys
from pathlib import Path
from statistics import mean

import pytest

from configs.named_agents import NAMED_AGENTS
from configs.sandbox import SandboxConfig
from rollout.environments.sandbox.commands import SandboxedCommands
from rollout.environments.sandbox.programs import shown_for
from tests.support.agent_installs import INSTALLS, path_with
from tests.support.learning_agents import draw_tasks, look, write_beginner, write_tasks
from tests.support.sandboxes import need_sandboxes
from tests.support.whole_runs import Run, check_tokens, small, started, steps_of, trained

CODEX = NAMED_AGENTS["codex"]
RESPONSE_TOKENS = 2048
STEPS, PROMPTS_PER_STEP, GROUP_SIZE = 30, 5, 8
SANDBOX = SandboxConfig(memory_mb=2048, cpu_s=600, max_processes=256)
KEYS = f"""
rollout.agent=codex rollout.agent_sandbox=true rollout.max_response_tokens={RESPONSE_TOKENS} rollout.max_staleness=1
rollout.reward=tests.support.learning_agents:ends_right rollout.max_failed_rewards=0
sandbox.memory_mb={SANDBOX.memory_mb} sandbox.cpu_s={SANDBOX.cpu_s} sandbox.max_processes={SANDBOX.max_processes}
sessions.max_turns=4 sessions.max_turn_tokens=8 sessions.on_limit=zero
trainer.total_steps={STEPS} trainer.prompts_per_step={PROMPTS_PER_STEP} algorithm.group_size={GROUP_SIZE}
trainer.lr=1e-3 trainer.lr_warmup_steps=2 trainer.eval_every=10 evaluation.temperature=1.0
data.prompt_template="{{question}}" data.max_prompt_tokens={CODEX.context - RESPONSE_TOKENS} data.num_val=20
""".split()


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_a_policy_learns_inside_codex_which_command_solves_which_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of five kinds of task has one command that solves it, and at first the policy seldom calls it.

    Takes 20 minutes on two cores.
    """
    need_sandboxes()
    install = INSTALLS["codex"]
    if (reason := install.reason_to_skip()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv("PATH", path_with(CODEX, tmp_path / "bin"))
    folders = [str(install.folder), sys.base_prefix]
    surroundings = look(CODEX, SandboxedCommands(SANDBOX, shown_for(CODEX.command, folders)))
    model = write_beginner(tmp_path / "model", surroundings, CODEX.context)
    files = [tmp_path / "train.jsonl", tmp_path / "val.jsonl"]
    for path, count, seed in zip(files, (STEPS * PROMPTS_PER_STEP, 20), (3, 4), strict=True):
        write_tasks(path, draw_tasks(count, seed))
    keys = [*KEYS, f"data.train_files={files[0]}", f"data.val_files={files[1]}"]
    with started(tmp_path, *small(model), *keys, f"rollout.agent_sandbox_folders=[{','.join(folders)}]") as run:
        assert run.wait_for_end(2400) == 0, run.output.read_text()
        check_tokens(run.run_dir)
        check_episodes(run)
        rewards = [record["critic/rewards/mean"] for record in steps_of(run.run_dir, "critic/rewards/mean")]
        assert mean(rewards[:3]) < 0.5 and mean(rewards[-5:]) >= 0.8, rewards


def check_episodes(run: Run) -> None:
    """Nothing is refused, and an episode is one sequence: a call, what it printed, and the last words."""
    for record in (record for step in trained(run) for record in step):
        assert record["agent_metrics"]["refused_requests"] == 0
        assert len(record["sequences"]) == 1
