"""Asynchronous over synchronous training, trainer and replica on one GPU."""

from scripts.bench.common import coin_reward
from scripts.bench.gpu.outcome import Setting
from scripts.bench.gpu.runs import ON_CPU, SHARED_GPU, train

# Random weights end a response at about every 500th token: long-tailed, cut off at 256. Half of the rewards are 1.
JOB = (
    "model=tiny",
    "model.warmup_steps=0",
    "data.num_val=1",
    "trainer.eval_every=0",
    "rollout.max_response_tokens=256",
    f"rollout.reward={coin_reward.__module__}:{coin_reward.__name__}",
)
MAX_STALENESS = 2


def compare_staleness(setting: Setting) -> dict[str, float]:
    """Two runs of the same job, with max_staleness 0 and 2."""
    steps = 2 if setting.dry_run else 16
    where = ON_CPU if setting.dry_run else (*SHARED_GPU, "weight_sync.transport=cuda_ipc")
    rates = {}
    for staleness in (0, MAX_STALENESS):
        overrides = [*where, *JOB, f"trainer.total_steps={steps}", f"rollout.max_staleness={staleness}"]
        rates[staleness] = train(setting, f"asynchrony-{staleness}", overrides)["samples_per_second"]
    return {
        "sync_samples_per_s": rates[0],
        "async_samples_per_s": rates[MAX_STALENESS],
        "async_over_sync": rates[MAX_STALENESS] / rates[0],
    }
