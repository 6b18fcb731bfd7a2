"""Advantages from returns, against verl's loops over padded rows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema import AlgorithmConfig, Config
from rollout.types import TrajectoryGroup
from tests.support.reference import make_group, make_trajectory
from tests.support.sequences import only
from trainer.advantages.credit import Credit, assign_credit
from trainer.tokens import sampled_tokens

BETA = 0.3


def made(seed: int, group_size: int) -> tuple[list[TrajectoryGroup], np.ndarray]:
    """Groups with a greedy trajectory each, and the KL of every token."""
    random = np.random.default_rng(seed)
    groups = []
    for ordinal in range(3):
        trajectories = [
            make_trajectory([1], [7] * int(random.integers(1, 6)), reward=float(random.normal()))
            for _ in range(group_size)
        ]
        greedy = make_trajectory([1], [7], reward=float(random.normal()))
        groups.append(replace(make_group(ordinal, trajectories), greedy=greedy))
    return groups, random.normal(size=sum(group.num_tokens for group in groups)).astype(np.float32)


def credit(groups: list[TrajectoryGroup], kl: np.ndarray, **algorithm: Any) -> Credit:
    config = Config(algorithm=AlgorithmConfig(kl_reward_coef=BETA, **algorithm))
    scores = {"kl": kl, "reference_logprobs": np.zeros_like(kl)}
    return assign_credit(groups, sampled_tokens(groups, 3), scores, config, 3)


def verl_rows(groups: list[TrajectoryGroup], kl: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return verl's token_level_rewards, after apply_kl_penalty, and its response_mask: [B, longest]."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = torch.zeros(len(trajectories), 6, dtype=torch.float64)
    mask = torch.zeros_like(rewards)
    parts = torch.from_numpy(kl).split([len(only(trajectory).response_ids) for trajectory in trajectories])
    for row, (trajectory, part) in enumerate(zip(trajectories, parts, strict=True)):
        rewards[row, len(part) - 1] = trajectory.reward
        rewards[row, : len(part)] -= BETA * part
        mask[row, : len(part)] = 1
    return rewards, mask


@pytest.mark.parametrize("group_size", [1, 4])
def test_reinforce_plus_plus_is_verls(group_size: int) -> None:
    groups, kl = made(0, group_size)
    rewards, mask = verl_rows(groups, kl)
    returns, running = torch.zeros_like(rewards), torch.zeros(len(rewards), dtype=torch.float64)
    for t in reversed(range(rewards.shape[1])):
        running = rewards[:, t] + running
        returns[:, t] = running
        running = running * mask[:, t]
    flat = returns[mask.bool()]
    expected = (flat - flat.mean()) / (flat.var() + 1e-8).sqrt()
    found = credit(groups, kl, advantage="reinforce_plus_plus", group_size=group_size)
    np.testing.assert_allclose(found.tokens.advantages, expected, atol=2e-6)


@pytest.mark.parametrize("group_size", [1, 4])
def test_remax_is_verls(group_size: int) -> None:
    groups, kl = made(1, group_size)
    rewards, mask = verl_rows(groups, kl)
    baselines = torch.tensor([group.greedy.reward for group in groups if group.greedy for _ in group.trajectories])
    returns = (rewards * mask).flip(dims=[-1]).cumsum(dim=-1).flip(dims=[-1])
    expected = (returns - baselines[:, None] * mask)[mask.bool()]
    found = credit(groups, kl, advantage="remax", group_size=group_size)
    np.testing.assert_allclose(found.tokens.advantages, expected, atol=2e-6)
    lengths = [len(only(trajectory).response_ids) for group in groups for trajectory in group.trajectories]
    means = [part.mean().item() for part in expected.split(lengths)]
    np.testing.assert_allclose(np.concatenate(found.advantages), means, atol=2e-6)


@pytest.mark.parametrize("advantage", ["reinforce_plus_plus", "remax"])
def test_what_has_no_reward_learns_nothing_and_counts_nowhere(advantage: str) -> None:
    groups, kl = made(2, 2)
    failed = replace(groups[0].trajectories[1], error="no", reward=99.0)
    with_failure = [replace(groups[0], trajectories=(groups[0].trajectories[0], failed)), *groups[1:]]
    without = [replace(groups[0], trajectories=groups[0].trajectories[:1]), *groups[1:]]
    first, second = (len(only(trajectory).response_ids) for trajectory in groups[0].trajectories)
    found = credit(with_failure, kl, advantage=advantage)
    expected = credit(without, np.delete(kl, slice(first, first + second)), advantage=advantage)
    assert found.tokens.advantages.tolist() == expected.tokens.advantages.tolist()
    assert found.advantages[0][1] == 0


def test_a_prompt_whose_greedy_response_has_no_reward_learns_nothing() -> None:
    groups, kl = made(3, 2)
    greedy = groups[0].greedy
    assert greedy is not None
    groups[0] = replace(groups[0], greedy=replace(greedy, error="no"))
    found = credit(groups, kl, advantage="remax")
    assert found.advantages[0].tolist() == [0, 0] and np.all(found.advantages[1] != 0)


@pytest.mark.parametrize("advantage", ["reinforce_plus_plus", "remax"])
def test_equal_rewards_give_exactly_zero_even_for_a_single_token(advantage: str) -> None:
    one = make_trajectory([1], [7], reward=0.1)
    for group in (make_group(0, [one]), make_group(0, [one] * 3)):
        found = credit([replace(group, greedy=one)], np.zeros(len(group.trajectories), np.float32), advantage=advantage)
        assert not found.tokens.advantages.any()


def test_the_optimal_token_baseline_is_verls() -> None:
    """compute_multi_turn_optimal_token_baseline_advantage of verl 0.9.1: trained tokens end to end, one row for each
    trajectory, and no baseline where the longest response is alone."""
    groups, kl = made(2, 4)
    random = np.random.default_rng(3)
    logprobs = -random.exponential(size=len(kl)).astype(np.float32)
    pi = np.exp(logprobs)
    squares = (pi**2 + random.uniform(size=len(kl)) * (1 - pi) ** 2).astype(np.float32)
    config = Config(algorithm=AlgorithmConfig(kl_reward_coef=BETA, advantage="otb"))
    scores = {"kl": kl, "reference_logprobs": kl, "logprobs": logprobs, "squared_probabilities": squares}
    found = assign_credit(groups, sampled_tokens(groups, 3), scores, config, 3)
    rewards, mask = verl_rows(groups, kl)
    lengths = mask.sum(1).int().tolist()
    energy = torch.zeros_like(rewards)
    energy[mask.bool()] = torch.from_numpy(1 - 2 * np.exp(logprobs) + squares).double()
    returns = (rewards * mask).flip(-1).cumsum(-1).flip(-1)
    path = (energy * mask).cumsum(-1) * mask
    expected = []
    for start in range(0, 12, 4):
        rows = slice(start, start + 4)
        baseline = (returns[rows] * path[rows]).sum(0) / (path[rows].sum(0) + 1e-8)
        second, longest = sorted(lengths[rows])[-2:]
        for row in range(start, start + 4):
            own = baseline.clone()
            if lengths[row] == longest > second:
                own[second:] = 0
            expected += (returns[row] - own)[: lengths[row]].tolist()
    np.testing.assert_allclose(found.tokens.advantages, expected, atol=2e-6)


def test_a_trajectory_without_a_reward_is_not_in_the_optimal_baseline() -> None:
    good = [make_trajectory([1], [7, 8], reward=reward) for reward in (1.0, 0.0)]
    failed = make_trajectory([1], [7, 8, 9], reward=5.0, error="the reward failed")
    config = Config(algorithm=AlgorithmConfig(advantage="otb"))
    found = []
    for trajectories in (good, [good[0], failed, good[1]]):
        groups = [make_group(0, trajectories)]
        tokens = sampled_tokens(groups, 3)
        flat = np.full(len(tokens.targets), -0.5, np.float32)
        scores = {"logprobs": flat, "squared_probabilities": -flat}
        found.append(assign_credit(groups, tokens, scores, config, 3).tokens.advantages.tolist())
    assert found[0] == found[1] == pytest.approx([0.5, 0.5, -0.5, -0.5])


def test_rounding_makes_no_energy_of_certain_tokens_negative() -> None:
    groups = [make_group(0, [make_trajectory([1], [7, 8], reward=reward) for reward in (1.0, 0.0)])]
    tokens = sampled_tokens(groups, 3)
    nearly = np.nextafter(np.float32(1), np.float32(0))
    scores = {"logprobs": np.zeros(4, np.float32), "squared_probabilities": np.array([1, nearly, nearly, nearly])}
    found = assign_credit(groups, tokens, scores, Config(algorithm=AlgorithmConfig(advantage="otb")), 3)
    assert found.tokens.advantages.tolist() == [1, 1, 0, 0]
