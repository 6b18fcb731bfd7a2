"""TRL is given the job we take ourselves, and the figures are medians of the right arm."""

import pytest

from scripts.bench.peer.job import peer_job, resolve
from scripts.bench.peer.runs import Result, show, summary


def result(arm: str, seconds: float, after: float = 0.9) -> Result:
    return Result(arm=arm, seconds=seconds, before=0.3, after=after, reward=0.8)


def test_the_loss_and_the_optimizer_are_ours() -> None:
    config = resolve(10, 0)
    job = peer_job(config, "folder", threads=1, sampling_seed=0)
    grpo = job["grpo"]
    assert (grpo["epsilon"], grpo["epsilon_high"], grpo["delta"], grpo["beta"]) == (0.2, 0.28, 3.0, 0.0)
    assert (grpo["loss_type"], grpo["scale_rewards"], grpo["mask_truncated_completions"]) == ("dapo", "group", False)
    assert (grpo["temperature"], grpo["top_p"], grpo["top_k"]) == (1.0, 1.0, 0)
    assert grpo["max_completion_length"] == job["max_new_tokens"] == 32
    assert grpo["max_grad_norm"] == 1.0
    assert job["optimizer"] == {
        "lr": config.trainer.lr,
        "betas": [0.9, 0.95],
        "weight_decay": 0.0,
        "warmup_steps": config.trainer.lr_warmup_steps,
    }


def test_the_prompts_are_those_of_our_stream_each_once() -> None:
    config = resolve(10, 0)
    job = peer_job(config, "folder", threads=1, sampling_seed=0)
    prompts = [row["prompt"] for row in job["train"]]
    held_out = {row["prompt"] for row in job["held_out"]}
    assert len(prompts) == len(set(prompts)) == 160
    assert len(held_out) == 256 and not held_out & set(prompts)
    assert all(row["prompt"].endswith("\nAnswer: ") and row["ground_truth"].isdigit() for row in job["train"])
    other_seed = peer_job(resolve(10, 1), "folder", threads=1, sampling_seed=0)
    assert [row["prompt"] for row in other_seed["train"]] != prompts
    assert {row["prompt"] for row in other_seed["held_out"]} == held_out


def test_the_quickest_arm_of_trl_counts_by_its_median(capsys: pytest.CaptureFixture[str]) -> None:
    results = [result("ours", seconds) for seconds in (20.0, 90.0, 30.0)]
    results += [result("TRL, 1 thread(s)", seconds, after=0.8) for seconds in (60.0, 60.0, 10.0)]
    results += [result("TRL, 2 thread(s)", seconds) for seconds in (70.0, 5.0, 70.0)]
    figures = summary(results, steps=120, repeats=3, version="1.16.0")
    assert (figures["ours_seconds"], figures["peer_seconds"], figures["ours_over_peer_time"]) == (30.0, 60.0, 0.5)
    assert (figures["ours_accuracy"], figures["peer_accuracy"]) == (0.9, 0.8)
    assert (figures["steps"], figures["repeats"], figures["trl"]) == (120, 3, "1.16.0")
    show(results)
    rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[3:]]
    assert rows == ["ours", "TRL, 1 thread(s)", "TRL, 2 thread(s)", ""]
