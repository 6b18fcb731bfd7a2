"""A run that is killed and resumed is the run that was never killed."""

import json
import signal
from pathlib import Path

import pytest

from scripts.launch.start import owner
from tests.support.whole_runs import (
    END_DEADLINE_S,
    PROMPTS_PER_STEP,
    START_DEADLINE_S,
    check_tokens,
    small,
    started,
    steps_of,
)
from weight_sync.transports.cleanup import DIRECTORY

pytestmark = pytest.mark.slow

STEPS = 8
ON_POLICY = f"""
trainer.total_steps={STEPS} trainer.eval_every=0 trainer.mini_batches=2 trainer.lr_schedule=linear
checkpoint.every=2 rollout.max_staleness=0 rollout.seeded_sampling=true resume=auto rollout.top_p=0.9 rollout.top_k=20
""".split()
LEARNED = ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/rewards/mean", "response_length/mean")


def weights_in_memory(run_dir: Path) -> list[Path]:
    return list(DIRECTORY.glob(f"slipstream-{owner(run_dir)}-*"))


@pytest.mark.timeout(1200)
def test_on_policy_a_resumed_run_learns_what_the_undisturbed_one_learns(tmp_path: Path, tiny_model: Path) -> None:
    """Killed between two checkpoints, with groups under way; the newest checkpoint is damaged besides, so that the one
    before is taken. It is resumed with another number of replicas. A batch is two optimizer steps, their rates fall,
    and sampling leaves tokens out."""
    job = [*small(tiny_model, "a_second"), *ON_POLICY]
    with started(tmp_path / "whole", *job) as whole:
        assert whole.wait_for_end(START_DEADLINE_S + END_DEADLINE_S) == 0, whole.output.read_text()
    with started(tmp_path / "killed", *job) as first:
        first.wait_for(" 7/8 ")
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
    assert weights_in_memory(first.run_dir) != []
    newest = max(path.parent for path in (first.run_dir / "checkpoints").glob("step_*/COMPLETE.json"))
    damaged = next((newest / "train").glob("*.distcp"))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    with started(tmp_path / "killed", *job, "rollout.num_replicas=2") as second:
        assert second.wait_for_end(START_DEADLINE_S + END_DEADLINE_S) == 0, second.output.read_text()
        output = second.output.read_text()
    assert weights_in_memory(second.run_dir) == []
    assert f"a checkpoint is refused: {damaged} is not what was written: its checksum differs" in output
    resumed_from = json.loads((second.run_dir / "summary.json").read_text())["resumed_from"]
    assert resumed_from == int(newest.name.removeprefix("step_")) - 2 and f" at step {resumed_from}: " in output
    expected, found = steps_of(whole.run_dir), steps_of(second.run_dir)
    assert [record["step"] for record in found] == [record["step"] for record in expected] == list(range(1, STEPS + 1))
    for name in LEARNED:
        values = [record[name] for record in expected]
        assert [record[name] for record in found] == pytest.approx(values, rel=1e-4, abs=1e-6), name
    result = check_tokens(second.run_dir)
    assert all(0 < record["rollout/kept_tokens"] <= 20 and not record["rollout/unknown_kept"] for record in found)
    assert (result.prompts, result.lost, result.twice) == (STEPS * PROMPTS_PER_STEP, 0, 0)
