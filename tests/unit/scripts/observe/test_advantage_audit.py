"""The audit recomputes the advantages of every built-in estimator in code of its own."""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf

from configs.algorithm import ADVANTAGES, GROUP_ADVANTAGES, AlgorithmConfig
from configs.runtime.environment import REPO_ROOT
from configs.schema import Config
from rollout.types import TrajectoryGroup
from scripts.observe.advantage_audit import AdvantageRule
from tests.support.reference import make_group, make_trajectory
from trainer.advantages.credit import assign_credit
from trainer.tokens import sampled_tokens
from trainer.tracking.trajectories import TrajectoryRecord, trajectory_records


def rewarded_groups(seed: int) -> list[TrajectoryGroup]:
    """Ragged groups with two rewards each, one trajectory without any, and a group of equal rewards."""
    random = np.random.default_rng(seed)
    groups: list[TrajectoryGroup] = []
    for ordinal in range(5):
        trajectories = []
        for index in range(4):
            right, short = (1.0, 0.5) if ordinal == 4 else (float(random.integers(2)), float(random.exponential()))
            trajectory = make_trajectory([1], [7] * int(random.integers(1, 9)), reward=right + 0.1 * short)
            error = "the reward failed" if (ordinal, index) == (2, 1) else None
            metrics = {} if error else {"right": right, "short": short}
            trajectories.append(replace(trajectory, reward_metrics=metrics, error=error))
        groups.append(make_group(ordinal, trajectories))
    return groups


def recorded(config: Config, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryRecord]:
    credit = assign_credit(groups, sampled_tokens(groups, 3), {}, config, 3)
    pairs = zip(groups, credit.advantages, strict=True)
    return [line for group, own in pairs for line in trajectory_records(group.prompt, group.trajectories, own.tolist())]


def rule_of(config: Config) -> AdvantageRule | None:
    structured = OmegaConf.structured(config)
    assert isinstance(structured, DictConfig)
    return AdvantageRule.of(structured)


@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize("name", GROUP_ADVANTAGES)
def test_what_the_trainer_computed_is_confirmed_and_nothing_else(name: str, normalizes: bool) -> None:
    weights = {"right": 1.0, "short": -0.3} if name == "gdpo" else {}
    config = Config(algorithm=AlgorithmConfig(advantage=name, normalize_by_std=normalizes, gdpo_weights=weights))
    records = recorded(config, rewarded_groups(0))
    rule = rule_of(config)
    assert rule is not None and list(rule.wrong(records)) == []
    records[3] = replace(records[3], advantage=(records[3].advantage or 0.0) + 0.01)
    assert len(list(rule.wrong(records))) == 1


@pytest.mark.parametrize("name", GROUP_ADVANTAGES)
def test_rewards_that_differ_by_rounding_change_no_advantage_of_another_group(name: str) -> None:
    """0.1 + 0.2 and 0.3 are one reward to the trainer, so that their group teaches nothing."""
    rounded = [
        replace(make_trajectory([1], [7] * 5, reward=reward), reward_metrics={"right": reward, "short": 0.5})
        for reward in (0.3, 0.1 + 0.2, 0.3, 0.3)
    ]
    weights = {"right": 1.0, "short": -0.3} if name == "gdpo" else {}
    config = Config(algorithm=AlgorithmConfig(advantage=name, gdpo_weights=weights))
    records = recorded(config, [*rewarded_groups(0), make_group(5, rounded)])
    rule = rule_of(config)
    assert rule is not None and list(rule.wrong(records)) == []


def test_the_page_on_proof_names_the_estimators_that_are_not_recomputed() -> None:
    page = (REPO_ROOT / "docs/proof.md").read_text().replace("\n", " ")
    (sentence,) = re.findall(r"Not recomputed are [^.]*\.", page)
    assert set(re.findall(r"`(\w+)`", sentence)) >= set(ADVANTAGES) - set(GROUP_ADVANTAGES)
    for name in set(ADVANTAGES) - set(GROUP_ADVANTAGES):
        assert rule_of(Config(algorithm=AlgorithmConfig(advantage=name))) is None
