"""The tiny model and tokenizer: lossless, loadable as any Hugging Face folder, and written all or nothing."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from trainer.tiny.model import EOS_TOKEN_ID, build_model, build_tokenizer, new_directory, save_tiny_model

CORPUS = ["Question: Tom has 7 apples. Tom sells 4.\nAnswer: 7-4=3\n#### 3"] * 3

TEXTS = [
    CORPUS[0],
    "Natalia sold 48/2 = <<48/2=24>>24 clips, i.e. $1,250.00 (50%)!\n\n  Two spaces.\tA tab.\r\n#### 72",
    "naïve café — “quotes” 数学 ½ ٣٤ 👩‍🚀 \u0000\u200b e\u0301",
    "  leading, trailing  ",
    " don't  isn't , . a ,b",
    "",
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(CORPUS)


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids


def test_the_seed_alone_decides_the_weights():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = build_model(448, seed=7).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second, other = build_model(448, seed=7).state_dict(), build_model(448, seed=8).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_a_saved_folder_loads_as_the_same_model_and_tokenizer(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    directory = tmp_path / "deep" / "tiny"
    save_tiny_model(directory, tokenizer, seed=3)
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    built = build_model(len(tokenizer), seed=3)
    assert loaded.config.architectures == ["Qwen3ForCausalLM"]
    ids = torch.arange(40)[None]
    torch.testing.assert_close(loaded(ids).logits, built(ids).logits, rtol=0, atol=0)
    assert GenerationConfig.from_pretrained(directory).eos_token_id == EOS_TOKEN_ID
    reloaded = AutoTokenizer.from_pretrained(directory)
    assert reloaded.eos_token_id == EOS_TOKEN_ID
    for text in TEXTS:
        assert reloaded(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert reloaded.decode(reloaded(text)["input_ids"]) == text


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_every_file_of_a_new_directory_may_be_read_by_whom_the_umask_says(tmp_path: Path, umask: int):
    before = os.umask(umask)
    try:
        with new_directory(tmp_path / "model") as aside:
            save_file({"weight": torch.zeros(1)}, aside / "model.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "model" / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_failed_write_leaves_nothing(tmp_path: Path):
    with pytest.raises(RuntimeError, match="disk"), new_directory(tmp_path / "model") as aside:
        (aside / "half").write_text("")
        raise RuntimeError("disk")
    assert list(tmp_path.iterdir()) == []
