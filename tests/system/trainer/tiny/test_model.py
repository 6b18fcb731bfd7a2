"""The tiny model and tokenizer: lossless, loadable as any Hugging Face folder, and written all or nothing."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from trainer.tiny.model import EOS_TOKEN_ID, ModelSize, build_model, build_tokenizer, new_directory, save_tiny_model

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


def test_digits_stand_alone_and_frequent_words_are_one_token():
    tokenizer = build_tokenizer(["1234 apples and 1234 more"] * 20)
    assert tokenizer.tokenize("1234 apples") == ["1", "2", "3", "4", "Ġapples"]


def test_special_tokens_have_the_ids_of_the_model(tokenizer: PreTrainedTokenizerFast):
    config = build_model(len(tokenizer), seed=0).config
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (
        tokenizer.pad_token_id,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
    )


def test_vocab_size_is_a_ceiling_and_has_a_floor():
    assert len(build_tokenizer([chr(65 + i) * 40 for i in range(26)], vocab_size=300)) == 300
    with pytest.raises(ValueError, match="vocab_size=100: must be >= 260"):
        build_tokenizer(CORPUS, vocab_size=100)


def test_model_shape():
    model = build_model(vocab_size=449, seed=0, max_position_embeddings=128)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.get_input_embeddings().weight.shape == (512, 64)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert sum(parameter.numel() for parameter in model.parameters()) < 200_000
    assert model.config.max_position_embeddings == 128


def test_a_larger_model() -> None:
    config = build_model(512, seed=0, size=ModelSize(hidden_size=192, num_layers=4)).config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (192, 768, 4)
    assert config.initializer_range == pytest.approx(0.0608, abs=1e-4), "smaller than 0.08, for a wider sum"


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
    save_tiny_model(directory, CORPUS, seed=3)
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


def test_an_existing_directory_is_refused_and_left_alone(tmp_path: Path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "mine").write_text("precious")
    with pytest.raises(FileExistsError, match=r"tiny.*exists"):
        save_tiny_model(tmp_path / "tiny", CORPUS, seed=0)
    assert [path.name for path in tmp_path.rglob("*")] == ["tiny", "mine"]


def test_a_failed_write_leaves_nothing(tmp_path: Path):
    with pytest.raises(RuntimeError, match="disk"), new_directory(tmp_path / "model") as aside:
        (aside / "half").write_text("")
        raise RuntimeError("disk")
    assert list(tmp_path.iterdir()) == []


def test_the_slower_of_two_writers_is_told(tmp_path: Path):
    with pytest.raises(FileExistsError, match="another writer"), new_directory(tmp_path / "model") as slow:
        (slow / "by").write_text("slow")
        with new_directory(tmp_path / "model") as quick:
            (quick / "by").write_text("quick")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "by").read_text() == "quick"
