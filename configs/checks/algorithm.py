"""Values of `algorithm.*` that contradict one another, or that no part of the run would read."""

from collections.abc import Iterator

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
)
from configs.checks.problem import Problem, dotted_problems
from configs.schema import Config


def algorithm_problems(config: Config) -> Iterator[Problem]:
    yield from _advantage_problems(config)
    yield from _loss_problems(config.algorithm)
    yield from _correction_problems(config)
    yield from _rejection_problems(config.algorithm)


def _advantage_problems(config: Config) -> Iterator[Problem]:
    algorithm, max_tokens = config.algorithm, config.rollout.max_response_tokens
    yield from dotted_problems("algorithm.advantage", algorithm.advantage, ADVANTAGES, ADVANTAGE_PARAMETERS)
    if algorithm.group_size < algorithm.min_group_size:
        yield Problem("algorithm.group_size", "must be at least 2: group advantages of one trajectory are all 0")
    if algorithm.filter_groups and algorithm.group_size < 2:
        allowed = "needs algorithm.group_size of at least 2: the one reward of a group is always equal to itself"
        yield Problem("algorithm.filter_groups", allowed)
    for key in ("gamma", "gae_lambda"):
        if getattr(algorithm, key) != 1 and not algorithm.needs_critic:
            yield Problem(f"algorithm.{key}", "only algorithm.advantage=gae reads it")
    if algorithm.overlong_buffer_tokens > max_tokens:
        yield Problem("algorithm.overlong_buffer_tokens", f"at most rollout.max_response_tokens={max_tokens}")


def _loss_problems(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    yield from dotted_problems("algorithm.loss", algorithm.loss, tuple(LOSSES), LOSS_PARAMETERS)
    aggregation = algorithm.loss_aggregation or algorithm.default_aggregation
    if algorithm.loss_horizon is not None and aggregation is not LossAggregation.seq_mean_token_sum_norm:
        allowed = f"only seq_mean_token_sum_norm has a horizon, and loss_aggregation is {aggregation.value}"
        yield Problem("algorithm.loss_horizon", allowed)
    if algorithm.clip_ratio_c <= 1:
        yield Problem("algorithm.clip_ratio_c", "must be above 1: at 1 it would cut the gradient of on-policy tokens")
    if algorithm.clip_cov_low >= algorithm.clip_cov_high:
        yield Problem("algorithm.clip_cov_low", f"must be below algorithm.clip_cov_high={algorithm.clip_cov_high}")
    if algorithm.kl_loss_estimator is KLEstimator.k1:
        yield Problem("algorithm.kl_loss_estimator", "k2 or k3: as a loss, k1 has no mean gradient on policy")


def _correction_problems(config: Config) -> Iterator[Problem]:
    algorithm, correction = config.algorithm, config.algorithm.correction
    is_auto = correction is Correction.auto
    if not is_auto and CORRECTIONS[correction].weights is Weights.none:
        return
    num_steps = config.trainer.optimizer_steps_per_batch
    if algorithm.loss == "reinforce" and num_steps > 1:
        reason = "has no ratio pi / pi_old, so nothing corrects for what the optimizer steps before have changed"
        allowed = f"with {num_steps} optimizer steps per batch (trainer.mini_batches x epochs), {reason}"
        yield Problem("algorithm.loss", f"{allowed}: choose another, or algorithm.correction=none")
        return
    if algorithm.loss == "reinforce" and algorithm.proximal is not Proximal.current:
        if config.rollout.max_staleness > 0 or not is_auto:
            reason = "this loss has no ratio pi / pi_old, so its importance weights must cover the whole way to pi"
            yield Problem("algorithm.loss", f"{reason}: set algorithm.proximal=current, or correction=none")
    elif algorithm.proximal is Proximal.rollout and not is_auto:
        allowed = "its weights pi_old / mu are 1 with algorithm.proximal=rollout: set proximal=current or interpolated"
        yield Problem("algorithm.correction", allowed)


def _rejection_problems(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    preset = CORRECTIONS.get(algorithm.correction, CorrectionSpec())
    rejection = algorithm.rejection or preset.rejection
    bounds = {"rejection_low": algorithm.rejection_low, "rejection_high": algorithm.rejection_high}
    given = [key for key, value in bounds.items() if value is not None]
    high = algorithm.rejection_high
    if rejection is None:
        allowed = "nothing is rejected: set algorithm.rejection, or a correction that rejects"
        yield from (Problem(f"algorithm.{key}", allowed) for key in given)
        return
    is_ratio = rejection.value.endswith("k1")
    if not is_ratio and "rejection_low" in given:
        yield Problem("algorithm.rejection_low", f"{rejection.value} has no lower bound: only k1 is a ratio")
    if is_ratio and high is not None and high < 1:
        yield Problem("algorithm.rejection_high", f"must be at least 1: {rejection.value} is kept in [low, high]")
    if algorithm.rejection is not None:
        for key in ("rejection_high", "rejection_low") if is_ratio else ("rejection_high",):
            if key not in given:
                yield Problem(f"algorithm.{key}", f"algorithm.rejection={rejection.value} needs a number")
