"""Shared between the tests of whole runs: a model for sessions."""

from pathlib import Path

import pytest

from trainer.tiny import model as tiny
from trainer.tiny.chat_templates import QWEN25


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model whose tokenizer has a chat template."""
    tokenizer = tiny.build_tokenizer(["The weather in Paris is sunny.\n"] * 4)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = QWEN25
    model = tiny.build_model(len(tokenizer), seed=0)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    folder = tmp_path_factory.mktemp("chat") / "model"
    tiny.write_model_directory(folder, model, tokenizer)
    return folder
