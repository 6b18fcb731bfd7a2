"""Values of `algorithm.*` that contradict one another, or that no part of the run would read."""

from configs.algorithm import (
    ADVANTAGE_PARAMETERS,
    ADVANTAGES,
    CORRECTIONS,
    LOSS_PARAMETERS,
    LOSSES,
    AlgorithmConfig,
    Correction,
    CorrectionSpec,
    KLEstimator,
    LossAggregation,
    Proximal,
    Weights,
    loss_spec,
)
from configs.checks.problem import Problem, dotted_problems
from configs.schema import Config


def algorithm_problems(config: Config) -> list[Problem]:
    algorithm = config.algorithm
    return [
        *_advantage_problems(config),
        *_loss_problems(algorithm),
        *_kl_problems(algorithm),
        *_correction_problems(config),
        *_rejection_problems(algorithm),
    ]


def _advantage_problems(config: Config) -> list[Problem]:
    algorithm, max_tokens = config.algorithm, config.rollout.max_response_tokens
    problems = dotted_problems("algorithm.advantage", algorithm.advantage, ADVANTAGES, ADVANTAGE_PARAMETERS)
    smallest = 1 if algorithm.needs_critic else 2
    if algorithm.group_size < smallest:
        reason = "" if algorithm.needs_critic else ": group advantages of one trajectory are all 0"
        problems.append(Problem("algorithm.group_size", algorithm.group_size, f"must be at least {smallest}{reason}"))
    if algorithm.filter_groups and algorithm.group_size < 2:
        allowed = "needs algorithm.group_size of at least 2: the one reward of a group is always equal to itself"
        problems.append(Problem("algorithm.filter_groups", True, allowed))
    for key, value in (("gamma", algorithm.gamma), ("gae_lambda", algorithm.gae_lambda)):
        if value != 1 and not algorithm.needs_critic:
            problems.append(Problem(f"algorithm.{key}", value, "only algorithm.advantage=gae reads it"))
    if algorithm.overlong_buffer_tokens > max_tokens:
        allowed = f"at most rollout.max_response_tokens={max_tokens}"
        problems.append(Problem("algorithm.overlong_buffer_tokens", algorithm.overlong_buffer_tokens, allowed))
    return problems


def _loss_problems(algorithm: AlgorithmConfig) -> list[Problem]:
    problems = dotted_problems("algorithm.loss", algorithm.loss, tuple(LOSSES), LOSS_PARAMETERS)
    aggregation = algorithm.loss_aggregation or loss_spec(algorithm.loss).aggregation
    if algorithm.loss_horizon is not None and aggregation is not LossAggregation.seq_mean_token_sum_norm:
        allowed = f"only seq_mean_token_sum_norm has a horizon, and loss_aggregation is {aggregation.value}"
        problems.append(Problem("algorithm.loss_horizon", algorithm.loss_horizon, allowed))
    if not algorithm.clip_ratio_c > 1:
        allowed = "must be above 1: at 1 it would cut the gradient of on-policy tokens"
        problems.append(Problem("algorithm.clip_ratio_c", algorithm.clip_ratio_c, allowed))
    if algorithm.clip_cov_low >= algorithm.clip_cov_high:
        allowed = f"must be below algorithm.clip_cov_high={algorithm.clip_cov_high}"
        problems.append(Problem("algorithm.clip_cov_low", algorithm.clip_cov_low, allowed))
    return problems


def _kl_problems(algorithm: AlgorithmConfig) -> list[Problem]:
    if algorithm.kl_loss_estimator is KLEstimator.k1:
        allowed = "k2 or k3: as a loss, k1 has no mean gradient on policy"
        return [Problem("algorithm.kl_loss_estimator", algorithm.kl_loss_estimator.value, allowed)]
    return []


def _correction_problems(config: Config) -> list[Problem]:
    algorithm, correction = config.algorithm, config.algorithm.correction
    has_weights = correction is Correction.auto or CORRECTIONS[correction].weights is not Weights.none
    if algorithm.loss == "reinforce" and algorithm.proximal is not Proximal.current and has_weights:
        if config.rollout.max_staleness == 0 and correction is Correction.auto:
            return []
        reason = "this loss has no ratio pi / pi_old, so its importance weights must cover the whole way to pi"
        return [
            Problem("algorithm.loss", algorithm.loss, f"{reason}: set algorithm.proximal=current, or correction=none")
        ]
    if algorithm.proximal is Proximal.rollout and has_weights and correction is not Correction.auto:
        allowed = "its weights pi_old / mu are 1 with algorithm.proximal=rollout: set proximal=current or interpolated"
        return [Problem("algorithm.correction", correction.value, allowed)]
    return []


def _rejection_problems(algorithm: AlgorithmConfig) -> list[Problem]:
    preset = CORRECTIONS.get(algorithm.correction, CorrectionSpec())
    rejection = algorithm.rejection or preset.rejection
    low, high = algorithm.rejection_low, algorithm.rejection_high
    if rejection is None:
        allowed = "nothing is rejected: set algorithm.rejection, or a correction that rejects"
        given = {"algorithm.rejection_low": low, "algorithm.rejection_high": high}
        return [Problem(key, value, allowed) for key, value in given.items() if value is not None]
    if not rejection.value.endswith("k1"):
        if low is not None:
            allowed = f"{rejection.value} has no lower bound: only k1 is a ratio"
            return [Problem("algorithm.rejection_low", low, allowed)]
    elif high is not None and high < 1:
        return [
            Problem("algorithm.rejection_high", high, f"must be at least 1: {rejection.value} is kept in [low, high]")
        ]
    if algorithm.rejection is None:
        return []
    needed = {"algorithm.rejection_high": high}
    if rejection.value.endswith("k1"):
        needed["algorithm.rejection_low"] = low
    allowed = f"algorithm.rejection={rejection.value} needs a number"
    return [Problem(key, value, allowed) for key, value in needed.items() if value is None]
