"""Profiles, and folders of runs that took the times of one."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rollout.events.event import Stamped
from scripts.simulate.profile import Profile
from scripts.simulate.quantiles import Quantiles
from scripts.simulate.setup import KEYS, Setup
from scripts.simulate.simulate import Prediction, simulate
from scripts.simulate.stand_ins import Nothing
from tests.support.happenings import write

PROFILE = Profile(
    step_s=0.008,
    step_s_per_request=0.0004,
    prefill_s_per_token=2e-4,
    turn_tokens=Quantiles.lognormal(30, 0.7, 200),
    uncached_tokens=Quantiles((20.0,)),
    reward_s=Quantiles((0.05,)),
    dispatch_s=0.01,
    train_s=0.2,
    train_s_per_token=1e-4,
    computed_per_sampled=1.3,
    driver_s=0.02,
    publish_s=0.015,
    stage_s=0.04,
    swap_s=0.01,
)
WITH_TOOLS = replace(
    PROFILE, has_tools=True, turns=Quantiles.of([1, 2, 2, 3, 4]), tool_s=Quantiles.lognormal(0.3, 0.8, 3)
)
SHARED = replace(PROFILE, cores=2.0, engine_cores=1.8)
SETUP = Setup(num_replicas=1, max_num_seqs=32, max_staleness=1, group_size=4, prompts_per_step=6, steps=12)


@dataclass
class Recorded(Nothing):
    """Keeps the metrics of every step."""

    steps: list[dict[str, Any]] = field(default_factory=list)

    def record_step(
        self, global_steps: int, metrics: Any, groups: Any, advantages: Any, tokens: Any = None, evidence: Any = None
    ) -> None:
        self.steps.append({"step": global_steps, **metrics})


def simulated_run(run_dir: Path, profile: Profile, setup: Setup = SETUP) -> Prediction:
    """Write what a run of the profile leaves: events, metrics, config."""
    run_dir.mkdir(parents=True, exist_ok=True)
    stamped: list[Stamped] = []
    recorded = Recorded()
    done = simulate(profile, setup, whole=True, write=stamped.extend, recorder=recorded)
    write(run_dir, stamped)
    steps = [step | {"rollout/zero_variance_groups": 0.0} for step in recorded.steps]  # simulated rewards are equal
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    config: dict[str, Any] = {"evaluation": {"samples": 1}}
    for name, value in asdict(setup).items():
        section, _, key = KEYS[name].partition(".")
        config.setdefault(section, {})[key] = value
    loop = "made_up:agent_loop" if profile.has_tools else "single_turn"
    config["rollout"] |= {"agent_loop": loop, "agent": None, "agent_command": None}
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(config))
    return done
