"""Values of `algorithm.*` that contradict one another, or that no part of the run would read."""

from collections.abc import Iterator

from configs.algorithm import (
    ADVANTAGE_PARAMETERS,
    ADVANTAGES,
    CORRECTIONS,
    LOSS_PARAMETERS,
    LOSSES,
    OPTIMAL_BASELINE,
    AlgorithmConfig,
    Correction,
    CorrectionSpec,
    KLEstimator,
    LossAggregation,
    Proximal,
    Weights,
    make_rejection,
)
from configs.checks.problem import Problem, dotted_problems
from configs.checks.ranges import WEIGHT
from configs.rewards import parse_reward
from configs.schema import Config

PENALTIES = ("kl_reward_coef", "overlong_buffer_tokens")
"""The keys that take something off rewards."""


def algorithm_problems(config: Config) -> Iterator[Problem]:
    yield from _advantage_problems(config)
    yield from _loss_problems(config.algorithm)
    yield from _correction_problems(config)
    yield from _rejection_problems(config.algorithm)
    yield from _exact_problems(config)


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
    yield from _plain_reward_problems(config)
    rollout = config.rollout
    if algorithm.advantage == OPTIMAL_BASELINE and (rollout.top_p, rollout.top_k, rollout.min_p) != (1, -1, 0):
        allowed = "otb reads the probabilities of the whole vocabulary: set rollout.top_p=1 top_k=-1 min_p=0"
        yield Problem("algorithm.advantage", allowed)
    if algorithm.overlong_buffer_tokens > max_tokens:
        yield Problem("algorithm.overlong_buffer_tokens", f"at most rollout.max_response_tokens={max_tokens}")


def _plain_reward_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of the advantages that read the rewards as they are."""
    algorithm, weights = config.algorithm, config.algorithm.gdpo_weights
    if algorithm.advantage == "maxrl":
        for key in PENALTIES:
            if getattr(algorithm, key):
                yield Problem(f"algorithm.{key}", "must be 0: the rewards of maxrl may not be below 0")
    if algorithm.advantage != "gdpo":
        if weights and algorithm.advantage in ADVANTAGES:
            yield Problem("algorithm.gdpo_weights", "only algorithm.advantage=gdpo and your own estimators read it")
        return
    if len(weights) < 2:
        yield Problem("algorithm.gdpo_weights", "gdpo needs two rewards or more, as {gsm8k: 1, format: 0.1}")
    for name in (name for name, weight in weights.items() if not abs(weight) <= WEIGHT):
        yield Problem("algorithm.gdpo_weights", f"the weight of {name} must be a number of at most {WEIGHT:g}")
    try:
        terms = [term.name for term in parse_reward(config.rollout.reward)]
    except ValueError:  # which is a problem of its own
        terms = []
    for name in (name for name in weights if len(terms) > 1 and name.partition("/")[0] not in terms):
        yield Problem("algorithm.gdpo_weights", f"rollout.reward has no {name}, but {', '.join(terms)}")
    if algorithm.filter_groups:
        allowed = "must be false: a group whose rewards add up to the same may still differ in one of gdpo's"
        yield Problem("algorithm.filter_groups", allowed)
    for key in PENALTIES:
        if getattr(algorithm, key):
            yield Problem(f"algorithm.{key}", "must be 0: gdpo reads the rewards of algorithm.gdpo_weights alone")


def _loss_problems(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    yield from dotted_problems("algorithm.loss", algorithm.loss, tuple(LOSSES), LOSS_PARAMETERS)
    aggregation = algorithm.loss_aggregation or algorithm.default_aggregation
    if algorithm.loss_horizon is not None and aggregation is not LossAggregation.seq_mean_token_sum_norm:
        allowed = f"only seq_mean_token_sum_norm has a horizon, and loss_aggregation is {aggregation.value}"
        yield Problem("algorithm.loss_horizon", allowed)
    if algorithm.clip_ratio_c <= 1:
        yield Problem("algorithm.clip_ratio_c", "must be above 1: at 1 it would cut the gradient of on-policy tokens")
    estimator, is_unbiased = algorithm.kl_loss_estimator, algorithm.kl_loss_unbiased
    if estimator is KLEstimator.k1 and not is_unbiased:
        yield Problem("algorithm.kl_loss_estimator", "k2 or k3: as a loss, k1 has no mean gradient on policy")
    if estimator is KLEstimator.k2 and is_unbiased:
        allowed = "k1 or k3 with algorithm.kl_loss_unbiased=true: the mean of k2 is not the KL, however it is weighed"
        yield Problem("algorithm.kl_loss_estimator", allowed)
    if is_unbiased and not algorithm.kl_loss_coef:
        yield Problem("algorithm.kl_loss_unbiased", "there is no KL in the loss: set algorithm.kl_loss_coef")


def _correction_problems(config: Config) -> Iterator[Problem]:
    algorithm, correction = config.algorithm, config.algorithm.correction
    is_auto = correction is Correction.auto
    if not is_auto and CORRECTIONS[correction].weights is Weights.none:
        return
    if algorithm.loss == "vespo":
        if not (is_auto and algorithm.proximal is Proximal.rollout):
            reason = "its weight is already that of the whole way from mu to pi"
            yield Problem("algorithm.loss", f"{reason}: set algorithm.proximal=rollout, or correction=none")
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
        others = "proximal=current, interpolated or exact"
        allowed = f"its weights pi_old / mu are 1 with algorithm.proximal=rollout: set {others}"
        yield Problem("algorithm.correction", allowed)


def _exact_problems(config: Config) -> Iterator[Problem]:
    if config.algorithm.proximal is not Proximal.exact:
        return
    trainer = config.trainer
    if (size := trainer.sequence_parallel) > 1:
        allowed = f"ranks that share rows cannot compute them by version: trainer.sequence_parallel={size} must be 1"
        yield Problem("algorithm.proximal", allowed)
    if trainer.compile:
        allowed = "each version computes a part of a row, and trainer.compile=true would compile its every length"
        yield Problem("algorithm.proximal", f"{allowed}: set it to false")


def _rejection_problems(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    for name, its_bounds in algorithm.rejections.items():
        try:
            make_rejection(name, its_bounds)
        except ValueError as error:
            yield Problem("algorithm.rejections", str(error))
    preset = CORRECTIONS.get(algorithm.correction, CorrectionSpec())
    rejection = algorithm.rejection or preset.rejection
    bounds = {"rejection_low": algorithm.rejection_low, "rejection_high": algorithm.rejection_high}
    bounded = [key for key, value in bounds.items() if value is not None]
    high = algorithm.rejection_high
    if rejection is None:
        allowed = "nothing is rejected: set algorithm.rejection, or a correction that rejects"
        yield from (Problem(f"algorithm.{key}", allowed) for key in bounded)
        return
    is_ratio = rejection.value.endswith("k1")
    if not is_ratio and "rejection_low" in bounded:
        yield Problem("algorithm.rejection_low", f"{rejection.value} has no lower bound: only k1 is a ratio")
    if is_ratio and high is not None and high < 1:
        yield Problem("algorithm.rejection_high", f"must be at least 1: {rejection.value} is kept in [low, high]")
    if algorithm.rejection is not None:
        for key in ("rejection_high", "rejection_low") if is_ratio else ("rejection_high",):
            if key not in bounded:
                yield Problem(f"algorithm.{key}", f"algorithm.rejection={rejection.value} needs a number")
