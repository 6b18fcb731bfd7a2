"""The command `scripts.evaluate` shows, writes and refuses the right things."""

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from configs.schema import Config, DataConfig, EvaluationConfig
from rollout.evaluation.evaluator import Evaluation
from rollout.types import EvaluatedPrompt, EvaluatedSample
from scripts.evaluate import evaluate, table
from scripts.launch.evaluation import make_report
from tests.support.compose import CONFIGS, changed, invocation


def evaluated(source: str, *answers: str) -> EvaluatedPrompt:
    samples = [EvaluatedSample(accuracy=float(answer == "7"), answer=answer, num_tokens=10) for answer in answers]
    return EvaluatedPrompt(ordinal=0, data_source=source, samples=tuple(samples))


def test_a_report_has_scores_by_source_and_what_every_prompt_got() -> None:
    config = Config(
        data=DataConfig(val_files="aime.parquet"), evaluation=EvaluationConfig(samples=3, temperature=1.0, top_p=0.7)
    )
    prompts = (evaluated("aime", "7", "8", "7"), evaluated("aime", "7", "8", "8"))
    evaluation = Evaluation(prompts=prompts, pinned=True)
    report = make_report(config, "org/model", evaluation, num_failed=1, seconds=1.25)
    assert json.loads(json.dumps(report)) == report
    assert report["scores"]["aime"] == pytest.approx(
        {"avg@3": 1 / 2, "pass@1": 1 / 2, "pass@2": (1 + 2 / 3) / 2, "pass@3": 1, "maj@3": 1 / 2}
    )
    assert report["prompts"][1] == {
        **{"ordinal": 0, "data_source": "aime"},
        **{"accuracies": [1.0, 0.0, 0.0], "answers": ["7", "8", "8"]},
    }
    assert (report["model"], report["val_files"], report["reward"]) == ("org/model", "aime.parquet", "gsm8k")
    assert (report["num_prompts"], report["mean_response_tokens"], report["seconds"]) == (2, 10, 1.25)
    assert (report["failed_rewards"], report["samples"]) == (1, "samples.jsonl")
    assert report["evaluation"]["top_p"] == 0.7


def test_a_table_lines_up() -> None:
    scores = {"aime_2024": {"avg@2": 0.25, "pass@1": 0.25, "maj@2": 0.5}, "": {"avg@2": 1.0, "pass@1": 1.0}}
    assert table(scores).splitlines() == [
        "data source   avg@2  pass@1   maj@2",
        "aime_2024    0.2500  0.2500  0.5000",
        "-            1.0000  1.0000       -",
    ]


def test_a_dry_run_tells_the_plan_and_what_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = changed(
        Config(dry_run=True), data__val_files="/no/x.parquet", evaluation__samples=4, evaluation__temperature=0.5
    )
    assert evaluate(invocation(config, tmp_path)).exit_code == 0
    output = capsys.readouterr().out
    assert "samples: 4 per prompt, temperature 0.5, top-p 1, reward gsm8k" in output
    assert "warning: data.val_files=/no/x.parquet: no such file" in output
    assert list(tmp_path.iterdir()) == []


def test_evaluation_composes_its_config_as_training_does() -> None:
    train: Any = OmegaConf.to_container(OmegaConf.load(CONFIGS / "train.yaml"))
    evaluation: Any = OmegaConf.to_container(OmegaConf.load(CONFIGS / "evaluate.yaml"))
    for part in ("run", "sweep"):
        assert train["hydra"].pop(part) != evaluation["hydra"].pop(part)
    assert train["hydra"]["job"].pop("name") != evaluation["hydra"]["job"].pop("name")
    assert train == evaluation
