"""Shared between the tests of whole runs: a model for sessions."""

from pathlib import Path

import pytest

from tests.support.whole_runs import save_chat_model


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    save_chat_model(folder)
    return folder
