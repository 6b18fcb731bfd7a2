"""A tiny model that says one of a few texts in each of its turns, by chance: a policy for whole runs whose
agents need answers that mean something to them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from tests.support.paths import ROOT
from tests.support.whole_runs import Run, trained
from trainer.tiny import model as tiny
from trainer.tiny.chat_templates import QWEN25

VOCAB_SIZE = 4096
"""With it, English and JSON have about four characters in each token, as in the tokenizers of large models."""
END = "<|im_end|>"
LOUD = 16.0
"""The logit of what is said: all other tokens together are said once in two thousand times."""
LOUDER = 0.5
"""What is added to the logit of the first text, which is so what a policy without a temperature says."""
WIDTH = 64


def write_saying_model(folder: Path, texts: Sequence[str], max_tokens: int) -> Path:
    """Write the model, which reads up to `max_tokens`. Each text is one token, which follows the line break that ends
    the head of a turn, and the end of the turn follows each text. The first text is the likeliest."""
    tokenizer = tiny.build_tokenizer((path.read_text() for path in sorted(ROOT.glob("docs/*.md"))), VOCAB_SIZE)
    tokenizer.add_special_tokens({"eos_token": END, "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens([*(AddedToken(text, normalized=False) for text in texts)])  # pyright: ignore[reportArgumentType]
    tokenizer.chat_template = QWEN25
    said = [_id_of(tokenizer, text) for text in texts]
    end = _id_of(tokenizer, END)
    line_break = tokenizer.encode("\n", add_special_tokens=False)
    model = _untrained(len(tokenizer), max_tokens, end)
    _follow(model, [(line_break, said), (said, [end])])
    model.lm_head.weight.data[said[0]] *= 1 + LOUDER / LOUD
    tiny.write_model_directory(folder, model, tokenizer)
    return folder


def _id_of(tokenizer: Any, text: str) -> int:
    return tokenizer.convert_tokens_to_ids(text)


def _untrained(vocab_size: int, max_tokens: int, end: int) -> Qwen3ForCausalLM:
    """Build a model with one layer and one head: long prompts cost it little."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=False,
        eos_token_id=end,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).float()
    model.generation_config = GenerationConfig(eos_token_id=end)
    return model


def _follow(model: Qwen3ForCausalLM, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Let one of some tokens follow after one of others, whatever was said before: attention and MLP add nothing, so
    the last token alone decides."""
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
            weight.zero_()
    for axis, (before, after) in enumerate(pairs):
        weights["model.embed_tokens.weight"][before] = torch.eye(WIDTH)[axis]
        weights["lm_head.weight"][after, axis] = LOUD / WIDTH**0.5  # the last norm gives vectors of length WIDTH**0.5


def check_reading(run: Run, model: Path, work: str, seen: str) -> None:
    """Every conversation begins with its prompt, and the policy read what each of its commands said."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    files = sorted((run.run_dir / "trajectories").glob("step_*.npz"))
    for records, file in zip(trained(run), files, strict=True):
        tokens = np.load(file)
        parts = (("prompt_ids", "prompt_lengths"), ("response_ids", "response_lengths"))
        halves = (np.split(tokens[ids], np.cumsum(tokens[lengths])[:-1]) for ids, lengths in parts)
        sequences = zip(*halves, strict=True)
        for record in records:
            own = [next(sequences) for _ in record["sequences"]]
            conversation = max(own, key=lambda halves: len(halves[0]))  # a title's is shorter
            prompt, response = (tokenizer.decode(ids) for ids in conversation)
            assert record["prompt"] in prompt
            assert response.count(seen) == response.count(work)
