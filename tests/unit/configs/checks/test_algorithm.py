"""Values of `algorithm.*` that contradict one another or would silently do nothing are refused with a way out."""

from dataclasses import replace
from typing import Any

import pytest

from configs.algorithm import CORRECTIONS, LOSSES, Correction, KLEstimator, LossAggregation, Proximal, Rejection
from configs.schema import AlgorithmConfig, Config, RolloutConfig
from configs.validate import ConfigError, check

CURRENT = {"proximal": Proximal.current}


def config(max_staleness: int = 2, **algorithm: Any) -> Config:
    return Config(algorithm=AlgorithmConfig(**algorithm), rollout=RolloutConfig(max_staleness=max_staleness))


@pytest.mark.parametrize(
    ("algorithm", "line"),
    [
        ({"loss": "ppo"}, "algorithm.loss=ppo: must be one of ppo_clip, gspo, cispo, sapo, gmpo, dppo_tv, dppo_kl, "),
        ({"loss": "no.such:loss"}, "algorithm.loss=no.such:loss: no.such cannot be imported"),
        ({"loss": "math:no_such"}, "algorithm.loss=math:no_such: math has no no_such"),
        ({"loss": "math:sqrt"}, "algorithm.loss=math:sqrt: must be callable with (tokens, algorithm)"),
        (
            {"advantage": "gea"},
            "algorithm.advantage=gea: must be one of grpo, rloo, opo, grpo_passk, gpg, reinforce_plus_plus_baseline,",
        ),
        ({"advantage": "math:sqrt"}, "algorithm.advantage=math:sqrt: must be callable with (groups, algorithm)"),
        ({"overlong_buffer_tokens": 33}, "algorithm.overlong_buffer_tokens=33: at most rollout.max_response_tokens=32"),
        (
            {"advantage": "gae", "group_size": 1, "filter_groups": True},
            "algorithm.filter_groups=True: needs algorithm.group_size of at least 2",
        ),
        ({"advantage": "gae", "group_size": 0}, "algorithm.group_size=0: must be between 1 and"),
        ({"group_size": 1}, "algorithm.group_size=1: must be at least 2: group advantages of one trajectory are all 0"),
        ({"loss_horizon": 9}, "algorithm.loss_horizon=9: only seq_mean_token_sum_norm has a horizon, and loss_agg"),
        ({"clip_cov_low": 5.0}, "algorithm.clip_cov_low=5.0: must be below algorithm.clip_cov_high=5.0"),
        ({"kl_loss_estimator": KLEstimator.k1}, "algorithm.kl_loss_estimator=k1: k2 or k3"),
        ({"correction": Correction.token_is}, "algorithm.correction=token_is: its weights pi_old / mu are 1 with"),
        ({"correction": Correction.geo_rs_seq_tis}, "algorithm.correction=geo_rs_seq_tis: its weights pi_old / mu"),
        ({"loss": "reinforce"}, "algorithm.loss=reinforce: this loss has no ratio pi / pi_old, so its importance"),
        ({"loss": "reinforce", "proximal": Proximal.interpolated}, "algorithm.loss=reinforce: this loss has no ratio"),
        ({"loss": "reinforce", "correction": Correction.seq_is}, "algorithm.loss=reinforce: this loss has no ratio"),
        ({"gamma": 0.9}, "algorithm.gamma=0.9: only algorithm.advantage=gae reads it"),
        ({"gae_lambda": 0.9}, "algorithm.gae_lambda=0.9: only algorithm.advantage=gae reads it"),
        ({"rejection_low": 0.5}, "algorithm.rejection_low=0.5: nothing is rejected: set algorithm.rejection"),
        ({**CURRENT, "rejection_high": 2.0}, "algorithm.rejection_high=2.0: nothing is rejected"),
        (
            {"correction": Correction.k3_rs, "rejection_low": 0.5},
            "algorithm.rejection_low=0.5: seq_mean_k3 has no lower bound",
        ),
        (
            {"correction": Correction.geo_rs, "rejection_high": 0.9},
            "algorithm.rejection_high=0.9: must be at least 1: seq_mean_k1 is kept in [low, high]",
        ),
        (
            {"rejection": Rejection.token_k1, "rejection_high": 2.0},
            "algorithm.rejection_low=None: algorithm.rejection=token_k1 needs a number",
        ),
        (
            {"correction": Correction.geo_rs, "rejection": Rejection.token_k2},
            "algorithm.rejection_high=None: algorithm.rejection=token_k2 needs a number",
        ),
    ],
)
def test_what_cannot_work_is_refused(algorithm: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(config(**algorithm))
    assert any(given.startswith(line) for given in str(caught.value).splitlines()), caught.value


@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss": "os.path:join"},
        {"advantage": "os.path:join"},
        {"overlong_buffer_tokens": 32},
        {"advantage": "gae", "group_size": 1, "gamma": 0.99, "gae_lambda": 0.95},
        {"advantage": "reinforce_plus_plus", "group_size": 1},
        {"advantage": "remax", "group_size": 1},
        {"loss_horizon": 1, "loss_aggregation": LossAggregation.seq_mean_token_sum_norm},
        {"correction": Correction.geo_rs, "rejection_low": 0.9, "rejection_high": 1.0},
        {"correction": Correction.none},
        {"rejection": Rejection.seq_max_k3, "rejection_high": 1e-3},
        {"rejection": Rejection.token_k1, "rejection_low": 0.5, "rejection_high": 2.0},
        {"loss": "reinforce", **CURRENT},
        {"loss": "reinforce", "correction": Correction.none},
        {"loss": "reinforce", "correction": Correction.geo_rs},
        {"loss": "reinforce", "max_staleness": 0},
        *({"loss": loss, **CURRENT} for loss in LOSSES),
        *({"correction": correction, **CURRENT} for correction in Correction),
        *({"correction": correction, "proximal": Proximal.interpolated} for correction in Correction),
    ],
)
def test_what_can_work_is_taken(algorithm: dict[str, Any]) -> None:
    check(config(**algorithm))


def test_every_correction_but_auto_says_what_it_does() -> None:
    assert {*CORRECTIONS, Correction.auto} == set(Correction)
    for spec in CORRECTIONS.values():
        assert (spec.rejection is None) == (spec.high is None)
        assert (spec.low is not None) == (spec.rejection is not None and spec.rejection.value.endswith("k1"))


def test_a_reference_is_needed_only_for_a_kl() -> None:
    assert not AlgorithmConfig().needs_reference
    assert AlgorithmConfig(kl_loss_coef=0.1).needs_reference
    assert AlgorithmConfig(kl_reward_coef=0.1).needs_reference
    assert not replace(AlgorithmConfig(), entropy_coef=0.1).needs_reference
