"""A configuration to predict: what of a run's config decides its throughput."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

from configs.algorithm import AlgorithmConfig
from configs.checkpoint import CheckpointConfig
from configs.data import NO_FILES
from configs.schema import Config, EvaluationConfig, RolloutConfig, StalePolicy, TrainerConfig, WeightSyncConfig
from scripts.simulate.profile import PredictError
from scripts.simulate.simulated_run import without_deadlines

KEYS = {
    "num_replicas": "rollout.num_replicas",
    "num_ranks": "trainer.num_ranks",
    "max_num_seqs": "rollout.max_num_seqs",
    "episodes_per_seat": "rollout.episodes_per_seat",
    "max_staleness": "rollout.max_staleness",
    "stale_policy": "rollout.stale_policy",
    "interval": "weight_sync.interval",
    "group_size": "algorithm.group_size",
    "prompts_per_step": "trainer.prompts_per_step",
    "eval_every": "trainer.eval_every",
    "checkpoint_every": "checkpoint.every",
    "steps": "trainer.total_steps",
}
"""Field of a setup -> key of the config."""
AT_LEAST_0 = {"max_staleness", "eval_every", "checkpoint_every"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Fields as the keys of the config in `KEYS`.

    Example: replace(Setup.of(config), max_staleness=4, num_replicas=12)
    """

    num_replicas: int = 1
    num_ranks: int = 1
    max_num_seqs: int = 256
    episodes_per_seat: int = 2
    max_staleness: int = 2
    stale_policy: str = "wait"
    interval: int = 1
    group_size: int = 8
    prompts_per_step: int = 16
    eval_every: int = 0
    checkpoint_every: int = 0
    steps: int = 20

    def __post_init__(self) -> None:
        """Check the values. Raises PredictError, which names the key."""
        for item in fields(self):
            value, key = getattr(self, item.name), KEYS[item.name]
            if item.name == "stale_policy":
                allowed = [policy.value for policy in StalePolicy]
                if value not in allowed:
                    raise PredictError(f"{key}={value}: must be one of {', '.join(allowed)}")
                continue
            least = 0 if item.name in AT_LEAST_0 else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise PredictError(f"{key}={value!r}: must be a whole number, at least {least}")
        if self.steps % self.interval:
            raise PredictError(
                f"trainer.total_steps={self.steps}: must be a multiple of weight_sync.interval={self.interval}"
            )

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> "Setup":
        """Take the fields from a config.yaml. Raises PredictError if a key is missing."""
        values = {}
        for name, key in KEYS.items():
            section, _, key_in_it = key.partition(".")
            if key_in_it not in (config.get(section) or {}):
                raise PredictError(f"the run's config.yaml has no {key}")
            values[name] = config[section][key_in_it]
        if (config.get("data") or {}).get("val_files") == NO_FILES:
            values["eval_every"] = 0  # nothing is held out
        return cls(**values)

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    def rate_after_first(self, step_s: Sequence[float]) -> float:
        """Return the samples per second of steps that took so long, without the first, which warms up, if there are
        others."""
        return self.samples_per_step / fmean(step_s[1:] or step_s)

    def config(self, evaluation_replicas: int = 1) -> Config:
        """Return the config of the parts of a simulated run, without deadlines."""
        return without_deadlines(
            Config(
                algorithm=AlgorithmConfig(group_size=self.group_size),
                rollout=RolloutConfig(
                    num_replicas=self.num_replicas,
                    max_num_seqs=self.max_num_seqs,
                    episodes_per_seat=self.episodes_per_seat,
                    max_staleness=self.max_staleness,
                    stale_policy=StalePolicy(self.stale_policy),
                ),
                evaluation=EvaluationConfig(replicas=evaluation_replicas),
                trainer=TrainerConfig(
                    total_steps=self.steps,
                    prompts_per_step=self.prompts_per_step,
                    num_ranks=self.num_ranks,
                    eval_every=self.eval_every,
                ),
                weight_sync=WeightSyncConfig(interval=self.interval),
                checkpoint=CheckpointConfig(every=self.checkpoint_every),
            )
        )
