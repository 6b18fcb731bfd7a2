"""Tiny models: a byte-level tokenizer of its own corpus and a Qwen3 of 0.2 to a few million parameters, built in a
second.

The architecture is plain `Qwen3ForCausalLM`, or `Qwen3MoeForCausalLM` where there are experts, so that transformers,
FSDP2 and vLLM load the folder as any other.
"""

import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AddedToken,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from trainer.tiny import chat

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD_TOKEN_ID, BOS_TOKEN_ID, EOS_TOKEN_ID, _ = range(4)
SPECIAL_IDS: dict[str, Any] = {
    "pad_token_id": PAD_TOKEN_ID,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
}
VOCAB_SIZE = 512
CHAT_VOCAB_SIZE = 1024
CHAT_CORPUS = 2000
"""Conversations that a chat tokenizer is trained on at most: their texts are long, and repeat themselves soon."""
JSON_OR_WORD = r"""\{".*"|"?\}+|'s| ?\p{L}+| ?[^\s\p{L}{}]+|\s+(?!\S)|\s+"""
VOCAB_MULTIPLE = 64
EXPERTS_PER_TOKEN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Width and depth. The defaults give 0.2M parameters with a vocabulary of 512."""

    hidden_size: int = 64
    num_layers: int = 2
    num_experts: int = 0
    """Experts of each layer, 0 in a dense model. The two of a token are together as wide as a dense layer."""


TINY = ModelSize()
TinyModel = Qwen3ForCausalLM | Qwen3MoeForCausalLM


def build_tokenizer(corpus: Iterable[str], vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on `corpus`, with at most `vocab_size` tokens.

    Every byte is a token, so any text survives encode and decode unchanged, and nothing is ever `<unk>`. Each digit is
    a token of its own: a model this small cannot learn arithmetic over merged numbers. No special tokens are added.
    """
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return _trained(corpus, SPECIAL_TOKENS, vocab_size, [words])


def build_chat_tokenizer(corpus: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer as `build_tokenizer` does, with the template and control tokens of `trainer.tiny.chat`, and at
    most 1024 tokens.

    Between digits and control tokens, whatever the corpus repeats is one token, however long it is: the description of
    a tool, or the frame of a call. A turn ends with the end of sequence.
    """
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _trained_for_chats(corpus, CHAT_VOCAB_SIZE, [whole])


def build_mixed_tokenizer(corpus: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer for demonstrations of which some are chats, with their template and control tokens.

    Words are split as by `build_tokenizer`, so that names are made of known pieces. A run of JSON up to the next digit
    is a word, too: the description of a tool, or the frame of a call, is one token where the corpus repeats it.
    """
    pieces = pre_tokenizers.Split(Regex(JSON_OR_WORD), behavior="isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _trained_for_chats(corpus, vocab_size, [pieces, whole])


def _trained_for_chats(corpus: Iterable[str], vocab_size: int, words: list[Any]) -> PreTrainedTokenizerFast:
    control = re.compile("|".join(map(re.escape, (chat.START, chat.END, *chat.TAGS))))
    texts = (text for conversation in islice(corpus, CHAT_CORPUS) for text in control.split(conversation))
    pad, bos, _, unk = SPECIAL_TOKENS
    tokenizer = _trained(texts, (pad, bos, chat.END, unk, chat.START), vocab_size, words)
    tags: list[str | AddedToken] = [AddedToken(tag, normalized=False) for tag in chat.TAGS]
    tokenizer.add_tokens(tags)
    tokenizer.chat_template = chat.TEMPLATE
    return tokenizer


def _trained(
    corpus: Iterable[str], special_tokens: tuple[str, ...], vocab_size: int, words: list[Any]
) -> PreTrainedTokenizerFast:
    """Train a BPE.

    Args:
        special_tokens: begin with those of SPECIAL_IDS, in their order.
        words: the pre-tokenizers that split what is between digits.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), *words])
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(special_tokens),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    pad, bos, eos, unk, *others = special_tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unk,
        additional_special_tokens=others,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_model(vocab_size: int, seed: int, size: ModelSize = TINY) -> TinyModel:
    """Build an untrained float32 Qwen3 with tied embeddings; `vocab_size` is rounded up to a multiple of 64.

    `seed` alone decides the weights; torch's global generator is unchanged. An `initializer_range` of 0.08 at a width
    of 64, 0.06 at 256, learns sooner than the usual 0.02.
    """
    shape: dict[str, Any] = dict(
        vocab_size=-(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        hidden_size=size.hidden_size,
        intermediate_size=4 * size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.08 * (64 / size.hidden_size) ** 0.25,
        **SPECIAL_IDS,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if size.num_experts == 0:
            model = Qwen3ForCausalLM(Qwen3Config(**shape)).float()
        else:
            config = Qwen3MoeConfig(
                **shape,
                num_experts=size.num_experts,
                num_experts_per_tok=EXPERTS_PER_TOKEN,
                moe_intermediate_size=4 * size.hidden_size // EXPERTS_PER_TOKEN,
                norm_topk_prob=True,  # as in all Qwen3 mixtures, and unlike the default
            )
            model = Qwen3MoeForCausalLM(config).float()
    model.generation_config = GenerationConfig(**SPECIAL_IDS)
    return model


def save_tiny_model(directory: Path, tokenizer: PreTrainedTokenizerFast, seed: int, size: ModelSize = TINY) -> None:
    """Write an untrained model with its tokenizer as `write_model_directory` does."""
    write_model_directory(directory, build_model(len(tokenizer), seed, size), tokenizer)


def write_model_directory(directory: Path, model: TinyModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write config, safetensors, generation config and tokenizer into `directory`, completely or not at all.

    Raises:
        FileExistsError: `directory` exists.
    """
    with new_directory(directory) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)


def keep_model(source: Path, directory: Path) -> Path:
    """Give the files of a model another folder, as hard links or, on another file system, as copies. Return the
    folder."""

    def link(name: str, other: str) -> None:
        try:
            os.link(name, other)
        except OSError:
            shutil.copy2(name, other)

    with new_directory(directory) as aside:
        shutil.copytree(source, aside, copy_function=link, dirs_exist_ok=True)
    return directory


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory, which is renamed to `directory` if the block succeeds, and removed otherwise.

    A process that is killed inside the block leaves at most a hidden `.{name}.{hex}`.

    Raises:
        FileExistsError: `directory` exists before the block, or after it because another writer was quicker.
    """
    if directory.exists():
        raise FileExistsError(f"directory={str(directory)!r} exists: remove it, or give a path that does not exist")
    aside = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}")
    aside.mkdir(parents=True)
    try:
        yield aside
        as_umask_says = aside.stat().st_mode & 0o666
        for path in aside.rglob("*"):
            if path.is_file():  # safetensors makes files that only their owner can read
                path.chmod(as_umask_says)
        try:
            aside.rename(directory)
        except OSError as error:  # renaming onto a full directory: the kind of error depends on the file system
            if directory.exists():
                raise FileExistsError(f"directory={str(directory)!r} was made by another writer meanwhile") from error
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
