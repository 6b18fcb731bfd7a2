"""Stand in for the trainer, the tokenizer, the rewards and the records of a simulated job."""

import asyncio
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from configs.rewards import RewardTerm
from rollout.engines.simulated import simulated_manifest
from rollout.rewards.places import Called
from rollout.rewards.scoring import RewardScorer
from rollout.types import FloatArray
from trainer.batch import StepBatch, StepResult
from trainer.checkpoint.store import METADATA
from trainer.metrics import Last, Max
from weight_sync.protocol import Manifest, PublishOrder


def write_state(folder: Path, shards: Mapping[str, bytes]) -> None:
    """Write the folder of a checkpoint that train workers write: their shards, and what names them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in shards.items():
        (folder / name).write_bytes(data)
    entries = {name: SimpleNamespace(relative_path=name, offset=0, length=len(data)) for name, data in shards.items()}
    (folder / METADATA).write_bytes(pickle.dumps(SimpleNamespace(storage_data=entries)))


class SimulatedTrainer:
    """Trains for a fixed time and publishes only a version."""

    def __init__(self, train_s: float):
        self._train_s = train_s
        self.global_steps = 0

    async def score(self, batch: StepBatch) -> dict[str, FloatArray]:
        raise RuntimeError("the job has no reference policy")

    async def train_step(self, batch: StepBatch | None, global_steps: int) -> StepResult:
        await asyncio.sleep(self._train_s)
        self.global_steps = global_steps + 1
        return StepResult({"perf/trainer_busy_s": Max(self._train_s), "actor/skipped_steps": Last(0.0)})

    def gauges(self) -> dict[str, float]:
        return {}

    async def publish(self, order: PublishOrder) -> Manifest:
        return simulated_manifest(order.global_steps)

    async def send(self, manifest: Manifest) -> int:
        assert manifest.checksum is not None
        return manifest.checksum


NO_REWARD = RewardScorer(((RewardTerm("no_reward", 1.0), Called(lambda prompt, text: 0.0, timeout_s=60.0)),))
"""Called on the event loop: a thread would not wait for the virtual clock."""


class NoTokenizer:
    eos_token_id, added_tokens_decoder, special_tokens_map = 0, {}, {}
    name_or_path, chat_template = "", None

    def decode(self, token_ids: Any, skip_special_tokens: bool) -> str:
        return ""


class Nothing:
    """No records."""

    newest_evaluated = -1

    def record_step(
        self, global_steps: int, metrics: Any, groups: Any, advantages: Any, tokens: Any = None, evidence: Any = None
    ) -> None: ...

    def record_discarded(self, group: Any) -> None: ...

    def record_evaluation(self, global_steps: int, evaluation: Any) -> None: ...

    def state(self) -> bytes:
        return b""

    def record_skipped_step(self, global_steps: int, reason: str, groups: Any, advantages: Any) -> tuple[int, str]:
        raise RuntimeError(f"step {global_steps}: {reason}")


class NoCheckpoints:
    def is_due(self, global_steps: int) -> bool:
        return False

    async def stage(self, global_steps: int) -> None: ...

    def commit(self, files: dict[str, bytes]) -> None: ...

    def gauges(self) -> dict[str, float]:
        return {}
