"""The supervised warm-up that gives a tiny model its first policy, and a cache of warm models.

Reinforcement learning needs a policy that is sometimes right. A cached model is named by a hash of everything that
decides its weights: settings, demonstrations, library versions and RECIPE_VERSION.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from trainer.tiny import model as tiny_model

RECIPE_VERSION = 1
"""Raise it with every change of this file or model.py that changes trained weights, so that no old model is found."""
LR_WARMUP_STEPS = 20
FINAL_LR_FRACTION = 0.05
MAX_GRAD_NORM = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WarmupSpec:
    """How to warm a model up.

    Example: WarmupSpec(seed=0, prompt_template="Question: {question}\\nAnswer: ")
    """

    seed: int
    """Seed of the initial weights."""
    size: tiny_model.ModelSize = tiny_model.TINY
    batch_size: int = 16
    """Demonstrations per optimizer step."""
    prompt_template: str
    """The prompt, with {question} in it."""

    def prompt(self, question: str) -> str:
        """Fill `question` into the template."""
        return self.prompt_template.replace("{question}", question)  # not format(): it may have other braces

    @property
    def lr(self) -> float:
        """Peak learning rate of AdamW, inverse to the width: 4e-3 at 64, 1e-3 at 256."""
        return 0.256 / self.size.hidden_size


def ensure_warm_model(
    cache_dir: Path, spec: WarmupSpec, demonstrations: Sequence[tuple[str, str]]
) -> Iterator[tuple[int, float] | Path]:
    """Yield what `warm_up` yields, and last the Hugging Face folder of the model. Later calls find it in the cache.

    Args:
        cache_dir: parent of these folders; made if missing.
        demonstrations: (question, answer) texts, trained on once, in this order, without an incomplete last batch.

    Raises:
        ValueError: the template lacks `{question}`.
    """
    if "{question}" not in spec.prompt_template:
        raise ValueError(f"prompt_template={spec.prompt_template!r}: must contain '{{question}}'")
    directory = cache_dir / f"warm-{_content_key(spec, demonstrations)}"
    if directory.exists():
        yield directory
        return
    prompts = [spec.prompt(question) for question, _ in demonstrations]
    answers = [answer for _, answer in demonstrations]
    tokenizer = tiny_model.build_tokenizer(prompt + answer for prompt, answer in zip(prompts, answers, strict=True))
    model = tiny_model.build_model(len(tokenizer), spec.seed, spec.size)
    examples = tokenized_examples(tokenizer, prompts, answers)
    yield from warm_up(model, examples, batch_size=spec.batch_size, lr=spec.lr)
    with contextlib.suppress(FileExistsError):  # a concurrent run has written the same model first
        tiny_model.write_model_directory(directory, model, tokenizer)
    yield directory


def _content_key(spec: WarmupSpec, demonstrations: Sequence[tuple[str, str]]) -> str:
    """Return 24 hex digits of the hash over everything that decides the trained weights."""
    versions = [RECIPE_VERSION, torch.__version__, transformers.__version__, tokenizers.__version__]
    parts = [dataclasses.asdict(spec), demonstrations, versions]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def tokenized_examples(
    tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], answers: Sequence[str]
) -> list[tuple[list[int], list[int]]]:
    """Return (prompt ids, answer ids + eos). Prompt and answer are tokenized separately, as in a rollout."""
    prompt_ids, answer_ids = tokenizer(list(prompts))["input_ids"], tokenizer(list(answers))["input_ids"]
    return [(prompt, [*answer, tiny_model.EOS_TOKEN_ID]) for prompt, answer in zip(prompt_ids, answer_ids, strict=True)]


def warm_up(
    model: Qwen3ForCausalLM, examples: Sequence[tuple[list[int], list[int]]], *, batch_size: int, lr: float
) -> Iterator[tuple[int, float]]:
    """Train `model` in place by cross-entropy on the answer tokens. Yield (steps done, loss) after every step.

    Args:
        examples: (prompt ids, answer ids ending with eos), at least one batch of them.
        lr: peak learning rate; it rises for 20 steps and then falls linearly to 5%.
    """
    steps = len(examples) // batch_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / LR_WARMUP_STEPS, max(FINAL_LR_FRACTION, 1 - step / steps))
    )
    model.train()
    for step in range(steps):
        loss = _answer_loss(model, examples[step * batch_size : (step + 1) * batch_size])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        yield step + 1, loss.item()


def _answer_loss(model: Qwen3ForCausalLM, batch: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Return the mean cross-entropy over all answer tokens of the batch.

    Padding is on the right, so that no real token attends to it, and no attention mask is needed.
    """
    texts = [torch.tensor(prompt + answer) for prompt, answer in batch]
    input_ids = pad_sequence(texts, batch_first=True, padding_value=tiny_model.PAD_TOKEN_ID)  # [B, T]
    answers = [torch.arange(len(prompt + answer)) >= len(prompt) for prompt, answer in batch]
    is_answer = pad_sequence(answers, batch_first=True)  # [B, T]
    hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state  # [B, T, H]
    logits = model.lm_head(hidden[:, :-1][is_answer[:, 1:]])  # [answer tokens, V]: a position predicts the next one
    return F.cross_entropy(logits, input_ids[is_answer])
