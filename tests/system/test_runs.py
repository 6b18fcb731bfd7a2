"""Whole runs, started as a user starts them: what they leave behind, and how they end when something breaks."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from trainer.tracking import read_metrics

REPO_ROOT = Path(__file__).resolve().parents[2]
GSM8K = REPO_ROOT.parent / "shared" / "data" / "gsm8k"
SMALL = [
    "device=cpu",
    "trainer.prompts_per_step=4",
    "data.num_train=200",
    "data.num_val=16",
    "rollout.max_num_seqs=16",
    "model.warmup_steps=0",
    "rollout.reward=tests.system.rewards:length_parity",
]
START_DEADLINE_S = 180
END_DEADLINE_S = 30


@dataclass
class Run:
    """A training process, its output, and every process it ever started."""

    process: subprocess.Popen[str]
    run_dir: Path
    output: Path
    children: dict[int, psutil.Process]
    command_lines: dict[int, list[str]]

    def watch_children(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.children[child.pid] = child
                self.command_lines[child.pid] = child.cmdline()

    def wait_for(self, text: str, deadline_s: float = START_DEADLINE_S) -> None:
        self.wait_for_count(text, 1, deadline_s)

    def wait_for_count(self, text: str, count: int, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        while self.output.read_text().count(text) < count:
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.output.read_text()}"
            assert time.monotonic() < deadline, f"no {text!r} after {deadline_s} s:\n{self.output.read_text()}"
            self.watch_children()
            time.sleep(0.1)

    def wait_for_end(self, deadline_s: float) -> int:
        deadline = time.monotonic() + deadline_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running after {deadline_s} s:\n{self.output.read_text()}"
            self.watch_children()
            time.sleep(0.1)
        return self.process.returncode

    def survivors(self) -> list[psutil.Process]:
        """Processes of the run that are still there 5 s after its end."""
        _, alive = psutil.wait_procs(list(self.children.values()), timeout=5)
        return [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


@contextlib.contextmanager
def started(tmp_path: Path, *overrides: str) -> Iterator[Run]:
    run_dir, output = tmp_path / "run", tmp_path / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "scripts.train", f"hydra.run.dir={run_dir}", *overrides],
            cwd=REPO_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # Of a shell's background jobs SIGINT is ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        run = Run(process, run_dir, output, {}, {})
        try:
            yield run
        finally:
            run.watch_children()
            for child in [process, *run.children.values()]:  # only what this test started
                with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                    child.kill()
            process.wait(timeout=10)


def find(run: Run, title: str) -> psutil.Process:
    """The run's process whose command line begins with `title`."""
    for child in run.children.values():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if child.cmdline() and title in " ".join(child.cmdline()):
                return child
    raise AssertionError(f"no process {title!r} among {[c.pid for c in run.children.values()]}")


def test_a_run_leaves_everything_a_user_looks_for(tmp_path: Path) -> None:
    """Two replicas, a real warm-up, staleness 2: counts, versions and files."""
    warm = [override for override in SMALL if not override.startswith(("model.", "rollout.reward"))]
    with started(
        tmp_path,
        *warm,
        "trainer.total_steps=12",
        "trainer.eval_every=6",
        "rollout.num_replicas=2",
        "model.warmup_steps=60",
        f"model.cache_dir={tmp_path / 'cache'}",
        "rollout.max_response_tokens=64",
        "evaluation.samples=4",
        "evaluation.temperature=1.0",
    ) as run:
        assert run.wait_for_end(START_DEADLINE_S) == 0, run.output.read_text()
        assert run.survivors() == []
        summary = json.loads((run.run_dir / "summary.json").read_text())
        assert summary["steps"] == 12
        assert summary["trajectories"] == summary["trajectories_started"] == 12 * 4 * 8
        assert summary["engine_requests"] == summary["trajectories_started"]
        assert summary["aborted"] == summary["restarted"] == 0
        assert summary["spanning_trajectories"] > 0
        assert 0 < summary["max_token_staleness"] <= summary["max_staleness"] == 2
        assert 0 <= summary["accuracy_before"] <= 1 and 0 <= summary["accuracy_after"] <= 1
        assert 0 < summary["pause_ms_p50"] <= summary["pause_ms_p99"]
        check_files(run)
        check_pinned_evaluation(run)
        metrics = read_metrics(run.run_dir / "metrics.jsonl")
        assert [record["step"] for record in metrics if "eval/accuracy" in record] == [0, 6, 12]
        steps = [record for record in metrics if "critic/rewards/mean" in record]
        assert [record["step"] for record in steps] == list(range(1, 13))
        for record in steps:
            assert record["staleness/max"] <= 2
            assert record["actor/grad_norm"] >= 0
            for family in (
                "actor/",
                "staleness/",
                "rollout/",
                "weight_sync/",
                "timing_s/",
                "perf/",
                "response_length/",
            ):
                assert any(key.startswith(family) for key in record), family


def check_pinned_evaluation(run: Run) -> None:
    """replica-1 held version 6 until its evaluation was over, beside updates, and was then trained with again."""
    records = read_metrics(run.run_dir / "metrics.jsonl")
    (place,) = [index for index, record in enumerate(records) if record["step"] == 6 and "eval/accuracy" in record]
    before = [record for record in records[:place] if record["step"] > 6]
    assert len(before) >= 2, "steps and updates went on meanwhile"
    assert all("weight_sync/pause_ms" in record for record in before)
    assert before[0]["rollout/healthy_replicas"] == 1 and records[-2]["rollout/healthy_replicas"] == 2
    assert {key: records[place][f"eval/{key}"] for key in ("pinned", "num_versions", "min_version", "max_version")} == {
        "pinned": 1,
        "num_versions": 1,
        "min_version": 6,
        "max_version": 6,
    }
    lines = (line for step in (11, 12) for line in trajectories_of(run, step))
    assert any(line["replica"] == "replica-1" and line["versions"][0][2] > 6 for line in lines)
    output = run.output.read_text()
    assert "replica-1 is out of service: it evaluates" in output and "replica-1 is back in service" in output


def trajectories_of(run: Run, step: int) -> list[dict[str, Any]]:
    path = run.run_dir / "trajectories" / f"step_{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_files(run: Run) -> None:
    for name in ("config.yaml", "metrics.jsonl", "curve.png", "driver.log", "logs/replica-0.log", "logs/replica-1.log"):
        assert (run.run_dir / name).is_file(), name
    assert (run.run_dir / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((run.run_dir / "wandb").glob("offline-run-*"))
    assert (run.run_dir.parent / "latest").resolve() == run.run_dir.resolve()
    ordinals = []
    for step in range(1, 13):
        records = trajectories_of(run, step)
        assert len(records) == 32
        ordinals += [record["ordinal"] for record in records if record["index"] == 0]
        for record in records:
            assert all(step - 1 - version <= 2 for _, _, version in record["versions"]), "the staleness bound"
    assert sorted(ordinals) == list(range(12 * 4)), "every prompt exactly once"
    assert "INFO" not in run.output.read_text(), "engine logs belong into files"


@pytest.mark.skipif(not GSM8K.is_dir(), reason="needs the real GSM8K files")
def test_real_gsm8k_files(tmp_path: Path) -> None:
    """The recipe for GPUs with the tiny model, and two FSDP ranks."""
    with started(
        tmp_path,
        "recipe=gsm8k",
        "model=tiny",
        f"data.train_files={GSM8K / 'train.jsonl'}",
        f"data.val_files={GSM8K / 'test.jsonl'}",
        "data.prompt_key=question",
        "data.answer_key=answer",
        "trainer.total_steps=2",
        "trainer.prompts_per_step=4",
        "data.num_val=32",
        "trainer.num_ranks=2",
        "model.warmup_steps=0",
        "device=cpu",
    ) as run:
        assert run.wait_for_end(START_DEADLINE_S) == 0, run.output.read_text()
        output = run.output.read_text()
        assert "train: 7473 prompts, 0 left out" in output
        assert json.loads((run.run_dir / "summary.json").read_text())["steps"] == 2


def test_a_run_with_every_part_of_the_algorithm(tmp_path: Path) -> None:
    """A critic, a reference in loss and reward, an entropy bonus, a correction and a loss of whole trajectories."""
    with started(
        tmp_path,
        *SMALL,
        "trainer.total_steps=3",
        "trainer.eval_every=0",
        "trainer.num_ranks=2",
        "algorithm.advantage=gae",
        "algorithm.loss=gspo",
        "algorithm.proximal=interpolated",
        "algorithm.correction=seq_is_rs",
        "algorithm.entropy_coef=0.001",
        "algorithm.kl_loss_coef=0.1",
        "algorithm.kl_reward_coef=0.1",
    ) as run:
        assert run.wait_for_end(START_DEADLINE_S) == 0, run.output.read_text()
        steps = [m for m in read_metrics(run.run_dir / "metrics.jsonl") if "actor/grad_norm" in m]
        assert len(steps) == 3
        assert steps[0]["critic/values/mean"] == 0, "the value head starts at 0"
        assert steps[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
        for name in ("critic/values/mean", "critic/vf_loss", "critic/grad_norm", "actor/kl_loss", "actor/grad_norm"):
            assert steps[-1][name] != 0, name
        for name in ("correction/rejected_fraction", "actor/reward_kl_penalty", "timing_s/score"):
            assert name in steps[-1], name


@pytest.mark.parametrize("who", ["reward", "engine", "train worker", "replica actor"])
def test_a_crash_ends_the_run_with_its_error(tmp_path: Path, who: str) -> None:
    """Exit code 1 within 30 s, the first error on the console, nothing left behind."""
    overrides = [*SMALL, "trainer.total_steps=100000", "trainer.eval_every=0", "rollout.max_replacements=0"]
    if who == "reward":
        overrides += ["rollout.reward=tests.system.rewards:raises_after_200", "rollout.max_failed_rewards=0"]
    if who == "train worker":
        overrides += ["checkpoint.every=0"]
    with started(tmp_path, *overrides) as run:
        run.wait_for("step  ")
        # Whoever talks to the dead first reports it: a rollout, an update, or the watch.
        expected = {
            "reward": "this reward was made to fail",
            "train worker": r"train worker 0 died; without checkpoints \(checkpoint.every=0\)",
        }.get(who, r"died|EngineDeadError|ActorDiedError")
        victim = {
            "engine": "VLLM::EngineCore",
            "train worker": "ray::TrainWorkerActor",
            "replica actor": "ray::Replica",
        }
        if who in victim:
            find(run, victim[who]).send_signal(signal.SIGKILL)
        assert run.wait_for_end(END_DEADLINE_S) == 1, run.output.read_text()
        output = run.output.read_text()
        assert re.search(expected, output)
        assert re.search(expected, (run.run_dir / "error.txt").read_text())
        assert run.survivors() == []
        assert read_metrics(run.run_dir / "metrics.jsonl"), "what was logged is kept"


DAPO_WITH_A_TOOL = [
    "algorithm.filter_groups=true",
    "algorithm.overlong_buffer_tokens=16",
    "algorithm.mask_truncated=true",
    "algorithm.advantage=trainer.advantage:reinforce_plus_plus",
    "rollout.agent_loop=rollout.envs.calculator:agent_loop",
]


def test_ctrl_c_ends_everything_and_keeps_what_was_logged(tmp_path: Path) -> None:
    with started(tmp_path, *SMALL, *DAPO_WITH_A_TOOL, "trainer.total_steps=100000", "trainer.eval_every=0") as run:
        run.wait_for("step  ")
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: every process of the group gets it
        assert run.wait_for_end(END_DEADLINE_S) == 130, run.output.read_text()
        assert "stopped; what was logged is in" in run.output.read_text()
        assert run.survivors() == []
        (step, *_) = [record for record in read_metrics(run.run_dir / "metrics.jsonl") if "actor/pg_loss" in record]
        assert step["rollout/zero_variance_groups"] == 0 and step["rollout/failed_rewards"] == 0
        assert step["critic/rewards/mean"] < step["critic/score/mean"], "an untrained model does not stop by itself"
