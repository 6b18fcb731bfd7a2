"""A tiny model that says one of a few texts in each of its turns, each about as often: a policy for whole runs whose
agents need answers that mean something to them."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken

from tests.support.paths import ROOT
from trainer.tiny import model as tiny
from trainer.tiny.chat_templates import QWEN25

VOCAB_SIZE = 4096
"""With it, English and JSON have about four characters in each token, as in the tokenizers of large models."""
END = "<|im_end|>"
LOUD = 16.0
"""The logit of what is said: all other tokens together are said once in two thousand times."""
SIZE = tiny.ModelSize(num_layers=1)


def write_saying_model(folder: Path, texts: Sequence[str], max_tokens: int) -> Path:
    """Write the model, which reads up to `max_tokens`. Each text is one token, which follows the line break that ends
    the head of a turn, and the end of the turn follows each text."""
    tokenizer = tiny.build_tokenizer((path.read_text() for path in sorted(ROOT.glob("docs/*.md"))), VOCAB_SIZE)
    tokenizer.add_special_tokens({"eos_token": END, "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    tokenizer.chat_template = QWEN25
    model = tiny.build_model(len(tokenizer), seed=0, size=SIZE)
    model.config.max_position_embeddings = max_tokens
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    said = tokenizer.convert_tokens_to_ids(list(texts))
    line_break = tokenizer.encode("\n", add_special_tokens=False)
    _follow(model, [(line_break, said), (said, [tokenizer.eos_token_id])])
    tiny.write_model_directory(folder, model, tokenizer)
    return folder


def _follow(model: tiny.TinyModel, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Let one of some tokens follow after one of others, whatever was said before: attention and MLP add nothing, so
    the last token alone decides."""
    model.config.tie_word_embeddings = False
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    embeddings = weights["model.embed_tokens.weight"]
    head = torch.zeros_like(embeddings)
    for axis, (before, after) in enumerate(pairs):
        embeddings[before] = torch.eye(embeddings.shape[1])[axis]
        head[after, axis] = LOUD / embeddings.shape[1] ** 0.5  # the last norm gives vectors of this length
    model.lm_head.weight = torch.nn.Parameter(head)
