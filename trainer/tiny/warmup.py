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
from transformers import PreTrainedTokenizerFast

from trainer.tiny import chat
from trainer.tiny import model as tiny_model

RECIPE_VERSION = 1
"""Raise it with every change of this file or model.py that changes trained weights, so that no old model is found."""
LR_WARMUP_STEPS = 20
FINAL_LR_FRACTION = 0.05
MAX_GRAD_NORM = 1.0


Demonstration = tuple[str, ...]
"""Texts, by turns what the model reads and what it should then say: (prompt, answer) or, with a tool,
(prompt, call, result, answer)."""
Example = tuple[list[int], list[bool]]
"""Token ids, and which of them the model should say."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WarmupSpec:
    """The settings of a warm-up.

    Example: WarmupSpec(seed=0)
    """

    seed: int
    """Seed of the initial weights."""
    size: tiny_model.ModelSize = tiny_model.TINY
    batch_size: int = 16
    """Demonstrations per optimizer step."""
    is_chat: bool = False
    """True if the demonstrations are `turns` of conversations: the tokenizer then has their chat template."""
    vocab_size: int = tiny_model.VOCAB_SIZE
    """The largest vocabulary of the tokenizer of demonstrations that are not all chats."""
    has_eos: bool = True
    """True if the model ends what it says with eos. It does not where a stop string ends every turn, nor if the
    demonstrations are mixed, some of them chats: then they have in them what ends each turn."""

    @property
    def lr(self) -> float:
        """Peak learning rate of AdamW, inverse to the width: 4e-3 at 64, 1e-3 at 256."""
        return 0.256 / self.size.hidden_size

    def tokenizer(self, demonstrations: Sequence[Demonstration]) -> PreTrainedTokenizerFast:
        """Train the tokenizer on the demonstrations."""
        corpus = ("".join(texts) for texts in demonstrations)
        if self.is_chat and not self.has_eos:
            return tiny_model.build_mixed_tokenizer(corpus, self.vocab_size)
        if self.is_chat:
            return tiny_model.build_chat_tokenizer(corpus)
        return tiny_model.build_tokenizer(corpus, self.vocab_size)


def ensure_warm_model(
    cache_dir: Path, spec: WarmupSpec, demonstrations: Sequence[Demonstration]
) -> Iterator[tuple[int, float] | Path]:
    """Yield what `warm_up` yields, and last the Hugging Face folder of the model. Later calls find it in the cache.

    Args:
        cache_dir: parent of these folders; made if missing.
        demonstrations: trained on once, in this order, without an incomplete last batch.
    """
    directory = cache_dir / f"warm-{_content_key(spec, demonstrations)}"
    if directory.exists():
        yield directory
        return
    tokenizer = spec.tokenizer(demonstrations)
    model = tiny_model.build_model(len(tokenizer), spec.seed, spec.size)
    examples = tokenized_examples(tokenizer, demonstrations, has_eos=spec.has_eos)
    yield from warm_up(model, examples, batch_size=spec.batch_size, lr=spec.lr)
    with contextlib.suppress(FileExistsError):  # a concurrent run has written the same model first
        tiny_model.write_model_directory(directory, model, tokenizer)
    yield directory


def _content_key(spec: WarmupSpec, demonstrations: Sequence[Demonstration]) -> str:
    """Return 24 hex digits of the hash over everything that decides the trained weights."""
    template = chat.TEMPLATE if spec.is_chat else None
    versions = [RECIPE_VERSION, torch.__version__, transformers.__version__, tokenizers.__version__]
    parts = [dataclasses.asdict(spec), template, demonstrations, versions]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def tokenized_examples(
    tokenizer: PreTrainedTokenizerFast, demonstrations: Sequence[Demonstration], *, has_eos: bool = True
) -> list[Example]:
    """Tokenize each text by itself, as in a rollout. What the model says ends with eos, if it `has_eos`."""
    ids: list[list[int]] = tokenizer([text for texts in demonstrations for text in texts])["input_ids"]  # pyright: ignore
    rest = iter(ids)
    end = [tiny_model.EOS_TOKEN_ID] if has_eos else []
    return [_example([next(rest) for _ in texts], end) for texts in demonstrations]


def _example(texts: Sequence[list[int]], end: list[int]) -> Example:
    token_ids: list[int] = []
    is_target: list[bool] = []
    for number, ids in enumerate(texts):
        by_model = number % 2 == 1
        token_ids += [*ids, *end] if by_model else ids
        is_target += [by_model] * (len(token_ids) - len(is_target))
    return token_ids, is_target


def warm_up(
    model: tiny_model.TinyModel, examples: Sequence[Example], *, batch_size: int, lr: float
) -> Iterator[tuple[int, float]]:
    """Train `model` in place by cross-entropy on what it should say. Yield (steps done, loss) after every step.

    Args:
        examples: at least one batch of them.
        lr: peak learning rate; it rises for 20 steps and then falls linearly to 5%.
    """
    steps = len(examples) // batch_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / LR_WARMUP_STEPS, max(FINAL_LR_FRACTION, 1 - step / steps))
    )
    model.train()
    for step in range(steps):
        loss = _said_loss(model, examples[step * batch_size : (step + 1) * batch_size])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        yield step + 1, loss.item()


def _said_loss(model: tiny_model.TinyModel, batch: Sequence[Example]) -> torch.Tensor:
    """Return the mean cross-entropy over all tokens of the batch that the model should say.

    Padding is on the right, so that no real token attends to it, and no attention mask is needed.
    """
    texts = [torch.tensor(token_ids) for token_ids, _ in batch]
    input_ids = pad_sequence(texts, batch_first=True, padding_value=tiny_model.PAD_TOKEN_ID)  # [B, T]
    is_target = pad_sequence([torch.tensor(is_target) for _, is_target in batch], batch_first=True)  # [B, T]
    hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state  # [B, T, H]
    logits = model.lm_head(hidden[:, :-1][is_target[:, 1:]])  # [tokens said, V]: a position predicts the next one
    return F.cross_entropy(logits, input_ids[is_target])
