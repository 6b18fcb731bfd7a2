"""Supervised runs as a user starts them: from a file of conversations to a model that a training run goes on from."""

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from scripts.observe.audit import audit
from scripts.observe.files import RunError
from tests.support.whole_runs import END_DEADLINE_S, SIZES, START_DEADLINE_S, check_tokens, exported, started, steps_of
from trainer.tracking.sinks import read_metrics

SFT = (sys.executable, "-m", "scripts.sft")
ANSWERS = ("4", "four", "It is 4.", "2 + 2 = 4")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write conversations of one and two turns, and one that is too long."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    turns = [[("user", "2 + 2?"), ("assistant", answer)] for answer in ANSWERS]
    turns += [[*turn, ("user", "Sure?"), ("assistant", "Yes.")] for turn in turns]
    turns += [[("user", "x" * 500), ("assistant", "y")]]
    with file.open("w", encoding="utf-8") as lines:
        for turn in turns:
            messages = [{"role": role, "content": content} for role, content in turn]
            lines.write(json.dumps({"messages": messages}) + "\n")
    return file


def run(folder: Path, *job: str) -> Path:
    with started(folder, *job, command=SFT) as running:
        assert running.wait_for_end(START_DEADLINE_S + END_DEADLINE_S) == 0, running.output.read_text()
        names = {Path(line[2]).name for line in running.command_lines.values() if len(line) > 2}
        assert not any("vllm" in name.lower() for name in names)
    return running.run_dir


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_conversations_are_learned_a_resumed_run_is_the_same_and_reinforcement_learning_goes_on(
    tmp_path: Path, rows: Path, chat_model: Path
) -> None:
    """The job has two ranks; the training run learns the same conversations beside its rollouts, and its audit is
    clean."""
    files = [f"sft.train_files={rows}", f"sft.val_files={rows}", "sft.max_tokens=200"]
    job = [
        *("device=cpu", "model=hf", "sizes=tiny", "model.kind=hf", f"model.path={chat_model}", *files),
        *("trainer.num_ranks=2", "trainer.total_steps=4", "trainer.prompts_per_step=6", "trainer.lr=3e-3"),
        *("trainer.lr_schedule=linear", "trainer.lr_warmup_ratio=0.25", "trainer.mini_batches=2"),
        *("trainer.eval_every=2", "checkpoint.every=2", "wandb.mode=disabled"),
    ]
    whole = run(tmp_path / "whole", *job)
    records = read_metrics(whole / "metrics.jsonl")
    steps = [record for record in records if "actor/ce_loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert [record["trainer/optimizer_steps"] for record in steps] == [2, 4, 6, 8]
    assert steps[-1]["sft/epoch"] == 3, "24 of 8"
    validations = [(record["step"], record["eval/ce_loss"]) for record in records if "eval/ce_loss" in record]
    assert [step for step, _ in validations] == [0, 2, 4] and validations[0][1] > 2 * validations[-1][1]
    summary = json.loads((whole / "summary.json").read_bytes())
    assert (summary["conversations"], summary["too_long"], summary["skipped_steps"]) == (8, 2, 0)
    assert summary["val_loss_after"] == validations[-1][1]

    with pytest.raises(RunError, match="holds a supervised run"):
        audit(whole)

    resumed = run(tmp_path / "resumed", *job, f"resume={whole / 'checkpoints' / 'step_000002'}")
    again = steps_of(resumed, "actor/ce_loss")
    assert [record["actor/ce_loss"] for record in again] == [record["actor/ce_loss"] for record in steps[2:]]
    first, second = (
        load_file(exported(folder, folder / "exported") / "model.safetensors") for folder in (whole, resumed)
    )
    assert all(weight.equal(second[name]) for name, weight in first.items())

    rl = [
        *(*SIZES, "model=hf", "sizes=tiny", f"model.path={whole}", *files, "data.chat_template=true"),
        *("data.prompt_template='{question}'", "rollout.reward=tests.support.rewards:length_parity"),
        *("trainer.total_steps=2", "trainer.eval_every=0", "checkpoint.every=0", "wandb.mode=disabled"),
        *("algorithm.ce_coef=0.5", "sft.per_step=4", "trainer.mini_batches=2"),
    ]
    with started(tmp_path / "rl", *rl) as running:
        assert running.wait_for_end(START_DEADLINE_S + END_DEADLINE_S) == 0, running.output.read_text()
    check_tokens(running.run_dir)
    trained = steps_of(running.run_dir)
    assert len(trained) == 2
    assert trained[0]["actor/ce_loss"] < (validations[0][1] + validations[-1][1]) / 2, "it begins where that ended"
