"""Stand-ins on a virtual clock for what a scene does not show: a trainer, a tokenizer, a reward, lengths."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from configs.rewards import RewardTerm
from rollout.agents.loop import Episode, EpisodeTask, GenerateGroup, SingleTurn
from rollout.engines.simulated import simulated_manifest
from rollout.rewards.places import Called
from rollout.rewards.scoring import RewardScorer
from weight_sync.protocol import Manifest, PublishOrder

NO_REWARD = RewardScorer(((RewardTerm("no_reward", 1.0), Called(lambda prompt, text: 0.0, timeout_s=60.0)),))
"""A reward that is called on the event loop: a thread would not wait for the virtual clock."""


class NoTokenizer:
    eos_token_id, added_tokens_decoder, special_tokens_map = 0, {}, {}
    name_or_path, chat_template = "", None

    def decode(self, token_ids: Any, skip_special_tokens: bool) -> str:
        return ""


class TenTokens:
    """A single-turn agent loop whose responses all have ten tokens."""

    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
        sampling = [replace(task.sampling, max_tokens=10, ignore_eos=True, stop_token_ids=()) for task in tasks]
        tasks = [replace(task, sampling=each) for task, each in zip(tasks, sampling, strict=True)]
        return await SingleTurn().run(tasks, generate)


class FixedTimeTrainer:
    """Trains for a fixed time and publishes only a version."""

    def __init__(self, train_s: float):
        self._train_s = train_s
        self.global_steps = 0

    async def train_step(self, batch: Any, global_steps: int) -> None:
        await asyncio.sleep(self._train_s)
        self.global_steps = global_steps + 1

    async def publish(self, order: PublishOrder) -> Manifest:
        return simulated_manifest(order.global_steps)

    async def send(self, manifest: Manifest) -> int:
        assert manifest.checksum is not None
        return manifest.checksum
