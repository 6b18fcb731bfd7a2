"""Exports of mixtures of experts, whose files have other tensors than the model that is trained."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoModelForCausalLM

from tests.support.families import loaded, random_model
from trainer.checkpoint.store import Checkpoint
from trainer.worker.export import export_hf
from trainer.worker.state import POLICY, WEIGHTS


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "qwen3_moe"])
def test_an_export_loads_to_the_bits_that_were_trained(family: str, tmp_path: Path) -> None:
    """In transformers, and in a trainer that starts from it."""
    model = random_model(family)
    trained = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    checkpoint = Checkpoint(path=tmp_path, global_steps=1, nbytes=0)
    model.config.save_pretrained(checkpoint.model_folder)
    weights = {f"causal_lm.{name}": tensor for name, tensor in trained.items()}
    save({POLICY: {WEIGHTS: weights}}, checkpoint_id=checkpoint.train_folder, no_dist=True)
    export_hf(checkpoint, tmp_path / "exported", torch.float32)
    for again in (AutoModelForCausalLM.from_pretrained(tmp_path / "exported"), loaded(tmp_path / "exported")):
        tensors = again.state_dict()
        assert tensors.keys() == trained.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in trained.items())
