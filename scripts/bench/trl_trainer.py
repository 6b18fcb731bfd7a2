"""TRL's side of the benchmark of a peer: `python -m scripts.bench.trl_trainer JOB.json`.

It runs on the Python of TRL's environment, which has neither ray nor vllm, so that of this project it imports only pure
modules.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from rollout.rewards.gsm8k import gsm8k
from rollout.types import Prompt

EVAL_BATCH = 128


class StepClock(TrainerCallback):
    """Measures the wall-clock seconds from the beginning of the first step to the end of the last."""

    began = ended = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended = time.perf_counter()


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    # Evaluated first, as in our run, so that the first steps of both sides find their libraries warm.
    before = greedy_accuracy(model, tokenizer, job["held_out"], job["max_new_tokens"])

    def reward(completions: list[str], ground_truth: list[str], **_: Any) -> list[float]:
        return [score(text, truth) for text, truth in zip(completions, ground_truth, strict=True)]

    clock = StepClock()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**job["grpo"]),
        train_dataset=Dataset.from_list(job["train"]),
        processing_class=tokenizer,
        callbacks=[clock],
        optimizers=make_optimizer(model, job["optimizer"]),
    )
    trainer.train()
    result = {
        "steps": trainer.state.global_step,
        "seconds": clock.ended - clock.began,
        "accuracy_before": before,
        "accuracy": greedy_accuracy(model, tokenizer, job["held_out"], job["max_new_tokens"]),
    }
    Path(job["result"]).write_text(json.dumps(result) + "\n")


def make_optimizer(
    model: torch.nn.Module, settings: dict[str, Any]
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """Return transformers' fused AdamW on our schedule: its own starts at a learning rate of 0."""
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings["lr"],
        betas=tuple(settings["betas"]),
        weight_decay=settings["weight_decay"],
        fused=True,
    )
    warmup_steps = max(1, settings["warmup_steps"])
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup_steps))


def score(text: str, ground_truth: str) -> float:
    """Return our reward `gsm8k`, 0 or 1."""
    return float(gsm8k(Prompt(ordinal=0, text="", token_ids=(), ground_truth=ground_truth), text).reward)


@torch.no_grad()
def greedy_accuracy(model: Any, tokenizer: Any, rows: Sequence[dict[str, str]], max_new_tokens: int) -> float:
    """Return the mean reward of greedy answers to `rows`, each with "prompt" and "ground_truth"."""
    model.eval()
    total = 0.0
    for start in range(0, len(rows), EVAL_BATCH):
        batch = rows[start : start + EVAL_BATCH]
        inputs = tokenizer([row["prompt"] for row in batch], return_tensors="pt", padding=True, padding_side="left")
        answers = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
        texts = tokenizer.batch_decode(answers[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        total += sum(score(text, row["ground_truth"]) for text, row in zip(texts, batch, strict=True))
    model.train()
    return total / len(rows)


if __name__ == "__main__":
    main()
