"""Shared between the tests of train workers: the untrained tiny model as a folder."""

import pytest

from tests.support.reference import VOCAB_SIZE
from trainer.tiny.model import build_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny"
    build_model(VOCAB_SIZE, seed=0).save_pretrained(path)
    return str(path)
