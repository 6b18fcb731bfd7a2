"""TRL gets the job that we take ourselves: the same loss, optimizer and prompts."""

from scripts.bench.peer import peer_job, resolve


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
        "warmup_steps": 5,
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
