"""Config, tokenizer and generation config in checkpoints: copies, but for the end tokens that a run adds."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.chat.end_tokens import end_token_ids
from tests.support.chat_models import base_tokenizer, chat_tokenizer
from trainer.worker.config_files import exported_config, model_files

CONFIG = b'{"model_type": "qwen2",  "rope_theta": 1e6, "an_old_key": [1], "torch_dtype": "bfloat16"}\n'
GENERATION = [
    {"bos_token_id": 1, "eos_token_id": 2, "temperature": 0.9, "top_p": 0.6},  # vicuna-7b-v1.5's
    {"temperature": 0.9, "top_p": 0.6},
    {"do_sample": False, "top_k": 1},
    {"do_sample": False, "temperature": 0.6, "a_new_key": {"a": None}},
]


def folder_of(tmp_path: Path, tokenizer: Any, generation_config: dict[str, Any] | None) -> Path:
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes(CONFIG)
    (tmp_path / "qwen.tiktoken").write_bytes(b"unknown to transformers")
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    for weights in ("model-00001-of-00001.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        (tmp_path / weights).write_bytes(b"{}")
    (tmp_path / "adapter_config.json").write_text("of another adapter")
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "params.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("generation_config", [None, *GENERATION])
def test_files_are_copied_byte_for_byte(tmp_path: Path, generation_config: dict[str, Any] | None) -> None:
    folder = folder_of(tmp_path, base_tokenizer(), generation_config)
    files = model_files(str(folder), chat=False)
    expected = {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "qwen.tiktoken"}
    assert set(files) == expected | ({"generation_config.json"} if generation_config else set())
    assert all(data == (folder / name).read_bytes() for name, data in files.items())


@pytest.mark.parametrize("generation_config", GENERATION)
def test_the_end_tokens_of_chats_are_added_and_all_else_stays(
    tmp_path: Path, generation_config: dict[str, Any]
) -> None:
    tokenizer = base_tokenizer()
    folder = folder_of(tmp_path, tokenizer, generation_config)
    before = [generation_config["eos_token_id"]] if "eos_token_id" in generation_config else []
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    found = json.loads(model_files(str(folder), chat=True)["generation_config.json"])
    assert set(found["eos_token_id"]) == {*before, *ends} and found["eos_token_id"][: len(before)] == before
    assert {**found, "eos_token_id": None} == {**generation_config, "eos_token_id": None}
    tokenizer.name_or_path = str(folder)
    (folder / "generation_config.json").write_text(json.dumps(found))
    assert set(end_token_ids(tokenizer, chat=False)) == {*before, *ends}, "whoever loads it stops there"
    assert json.loads(model_files(str(folder), chat=True)["generation_config.json"]) == found


def test_where_there_is_no_generation_config_one_is_made_only_if_tokens_are_missing(tmp_path: Path) -> None:
    tokenizer = base_tokenizer()
    folder = folder_of(tmp_path, tokenizer, None)
    end, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    (folder / "config.json").write_text(json.dumps({"eos_token_id": eos, "bos_token_id": 7, "pad_token_id": None}))
    made = json.loads(model_files(str(folder), chat=True)["generation_config.json"])
    assert made == {"bos_token_id": 7, "eos_token_id": [eos, end]}
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [end, eos]}))
    assert "generation_config.json" not in model_files(str(folder), chat=True)


@pytest.mark.parametrize(
    ("text", "said"), [("[", "is not JSON"), ('{"eos_token_id": "</s>"}', r"eos_token_id = '</s>': allowed is")]
)
def test_a_generation_config_that_says_nothing_sensible_is_refused(tmp_path: Path, text: str, said: str) -> None:
    folder = folder_of(tmp_path, chat_tokenizer("qwen3"), None)
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        model_files(str(folder), chat=True)


def test_an_exported_config_names_its_dtype_and_no_quantization() -> None:
    assert json.loads(exported_config(CONFIG, "float32")) == {**json.loads(CONFIG), "torch_dtype": "float32"}
    assert exported_config(CONFIG, "bfloat16") == CONFIG
    quantized = {"quantization_config": {"bits": 4}, "text_config": {"dtype": "bfloat16"}}
    assert json.loads(exported_config(json.dumps(quantized).encode(), "float16")) == {
        "text_config": {"dtype": "float16"},
        "dtype": "float16",
    }
