"""The recipes, made for GPUs and downloads, with the tiny model: on the real GSM8K if it is there, else on small files
with the published columns."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollout.environments.search.world import World
from scripts.prepare_data import prepare
from tests.support.paths import GSM8K, ROOT
from tests.support.published import dapo_record, search_r1_record, write_jsonl, write_parquet
from tests.support.searches import free_port, serves_the_world
from tests.support.whole_runs import START_DEADLINE_S, Run, started
from trainer.tracking.sinks import read_metrics

pytestmark = pytest.mark.slow

NUM_QUESTIONS = 12
STEPS = 15
"""The steps of the run whose retriever dies: enough for it to be still under way when that is back."""
OUTAGE_DEADLINE_S = 120
SMALL = [
    "model=tiny",
    "device=cpu",
    "model.warmup_steps=0",
    "trainer.total_steps=2",
    "trainer.prompts_per_step=4",
    "rollout.max_num_seqs=32",
    "rollout.num_agent_workers=2",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare GSM8K and small copies of DAPO-Math-17k, AIME 2024 and Search-R1's data."""
    folder = tmp_path_factory.mktemp("sources")
    gsm8k = [{"question": f"{n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(NUM_QUESTIONS)]
    for split in ("train", "test"):
        write_jsonl(folder / "gsm8k" / f"{split}.jsonl", gsm8k)
    dapo = [dapo_record(f"{n % NUM_QUESTIONS} + 1?", f"{n % NUM_QUESTIONS + 1}", f"uuid-{n}") for n in range(99)]
    aime = [{"ID": f"2024-I-{n}", "Problem": f"{n} + 2?", "Solution": "", "Answer": n + 2} for n in range(3)]
    questions = [World().draw(1, random.Random(n)) for n in range(NUM_QUESTIONS)]
    asked = [
        search_r1_record(one.text, [one.answer, "he"], "hotpotqa" if n % 2 else "nq", n)
        for n, one in enumerate(questions)
    ]
    for split, num in (("train", NUM_QUESTIONS), ("test", 4)):
        write_parquet(folder / "search_r1" / f"{split}.parquet", asked[:num])
    sources = {
        "search_r1": folder / "search_r1",
        "gsm8k": GSM8K if GSM8K.is_dir() else folder / "gsm8k",
        "dapo_math": write_parquet(folder / "dapo.parquet", dapo),
        "aime_2024": write_parquet(folder / "aime.parquet", aime),
    }
    for name, source in sources.items():
        assert list(prepare(name, str(source), folder / "data"))
    return folder / "data"


def recipe(name: str, data: Path) -> dict[str, Any]:
    """The shell script of a recipe with its data prepared, in this Python."""
    command = [ROOT / "scripts" / "recipes" / f"{name}.sh"]
    return {"command": command, "VIRTUAL_ENV": sys.prefix, "DATA": str(data)}


def steps_of(run: Run) -> list[dict[str, float]]:
    assert run.wait_for_end(START_DEADLINE_S) == 0, run.output.read_text()
    return read_metrics(run.run_dir / "metrics.jsonl")


def test_dapo_math(tmp_path: Path, data: Path) -> None:
    """Groups of 16, the +1/-1 reward, and avg@32 of the held-out problems, one step off."""
    with started(
        tmp_path,
        *SMALL,
        "rollout.max_staleness=1",
        "algorithm.filter_groups=false",  # untrained, it solves nothing
        **recipe("dapo_math", data),
    ) as run:
        metrics = steps_of(run)
        assert f"train: {NUM_QUESTIONS} prompts, 0 left out" in run.output.read_text()
        evaluations = [record for record in metrics if "eval/accuracy" in record]
        assert [record["step"] for record in evaluations] == [0, 2]
        for record in evaluations:
            assert record["eval/num_prompts"] == 3
            assert 0 <= record["val/aime_2024/avg@32"] <= record["val/aime_2024/pass@32"] <= 1
            assert record["eval/accuracy"] == pytest.approx(record["val/aime_2024/avg@32"])
        steps = [record for record in metrics if "critic/rewards/mean" in record]
        assert len(steps) == 2
        for record in steps:
            assert record["critic/rewards/min"] == -1
            assert record["reward/accuracy"] == pytest.approx((record["critic/rewards/mean"] + 1) / 2)
            assert record["staleness/max"] <= 1
        summary = json.loads((run.run_dir / "summary.json").read_text())
        assert summary["trajectories"] == 2 * 4 * 16
        assert summary["evaluation_requests"] == 2 * 3 * 32


def test_search_r1_outlasts_a_retriever_that_dies(tmp_path: Path, data: Path) -> None:
    """The server of `make retriever` is killed and started again during the run, whose model was warmed up to
    search. Episodes wait for it: none fails, and none is trained on a search that failed."""
    port = free_port()
    with (
        serves_the_world(port) as retriever,
        started(
            tmp_path,
            *SMALL,
            *("data.generated=search_world", "data.prompt_key=question", "rollout.max_response_tokens=160"),
            *("model.warmup_steps=80", f"model.cache_dir={tmp_path}/cache", f"trainer.total_steps={STEPS}"),
            f"rollout.agent_args.retriever.url=http://127.0.0.1:{port}/retrieve",
            *("rollout.agent_args.retriever.max_failures=1", "rollout.agent_args.retriever.cache_size=0"),
            "rollout.max_staleness=1",
            **recipe("search_r1", data),
        ) as run,
    ):
        run.wait_for("step  ")
        retriever.kill()
        deadline = time.monotonic() + OUTAGE_DEADLINE_S
        while "is down after 1 failures in a row" not in run.output.read_text():
            assert time.monotonic() < deadline and run.process.poll() is None, run.output.read_text()
            time.sleep(0.1)
        with serves_the_world(port):
            metrics = steps_of(run)
        assert f"the retriever at http://127.0.0.1:{port}/retrieve is back after" in run.output.read_text()
        assert f"train: {NUM_QUESTIONS} prompts, 0 left out" in run.output.read_text()
        evaluations = [record for record in metrics if "eval/accuracy" in record]
        assert [(record["step"], record["eval/num_prompts"]) for record in evaluations] == [(0, 4), (STEPS, 4)]
        for record in evaluations:
            assert record["eval/accuracy"] == (record["val/nq/avg@1"] + record["val/hotpotqa/avg@1"]) / 2
        steps = [record for record in metrics if "critic/rewards/mean" in record]
        assert len(steps) == STEPS
        for record in steps:
            assert record["agent/searches"] > 0 and record["agent/turns"] > 1 and "actor/kl_loss" in record
            assert record["agent/failed_searches"] == 0
            assert record["critic/rewards/mean"] == record["agent/exact_match"]
        assert steps[-1]["rollout/failed_rewards"] == 0
        summary = json.loads((run.run_dir / "summary.json").read_text())
        assert summary["trajectories"] == STEPS * 4 * 5


def test_gsm8k_with_a_sum_of_rewards_and_math_verify(tmp_path: Path, data: Path) -> None:
    """Synchronous, two FSDP ranks. The processes of math-verify start inside the Ray actor, and end with the run."""
    with started(
        tmp_path,
        *SMALL,
        "trainer.num_ranks=2",
        "data.num_val=12",
        "data.max_prompt_tokens=1200",  # a byte each, and the instruction
        "rollout.max_staleness=0",
        "rollout.verify_timeout_s=50",
        "rollout.reward=math_verify+0.5*format+tests.support.rewards:length_parity",
        "rollout.format_pattern=.*",
        **recipe("gsm8k", data),
    ) as run:
        metrics = steps_of(run)
        num_prompts = 7473 if GSM8K.is_dir() else NUM_QUESTIONS
        assert f"train: {num_prompts} prompts, 0 left out" in run.output.read_text()
        steps = [record for record in metrics if "critic/rewards/mean" in record]
        assert len(steps) == 2
        for record in steps:
            assert record["staleness/max"] == 0
            assert record["reward/format"] == 1
            assert record["reward/math_verify/given_up"] == 0
            parts = record["reward/math_verify"] + 0.5 * record["reward/format"] + record["reward/length_parity"]
            assert record["critic/rewards/mean"] == pytest.approx(parts, abs=1e-5)
        assert any("multiprocessing.spawn" in " ".join(line) for line in run.command_lines.values())
        assert run.survivors() == []
    evaluated = evaluate(
        tmp_path / "evaluation",
        *("sizes=tiny", f"model.path={run.run_dir}", "rollout.reward=tests.support.rewards:length_parity"),
        *(f"data.val_files={data}/gsm8k/test.parquet", "data.num_val=12", "data.max_prompt_tokens=1200"),
        "recipe=gsm8k",
    )
    assert "exported_model" in evaluated["model"], "the run folder's newest checkpoint"
    last = [record for record in metrics if "eval/accuracy" in record][-1]
    assert evaluated["mean_response_tokens"] == pytest.approx(last["eval/response_length"])


def evaluate(run_dir: Path, *overrides: str, shows: str = "") -> dict[str, Any]:
    """The report of scripts/evaluate.py, whose output has `shows` in it."""
    command = [sys.executable, "-m", "scripts.evaluate", f"hydra.run.dir={run_dir}", "device=cpu", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_DEADLINE_S, check=False)
    assert done.returncode == 0 and shows in done.stdout, done.stdout + done.stderr
    return json.loads((run_dir / "evaluation.json").read_text())
