"""Credit carries rewards to what every token learns: the numbers of each algorithm arrive at the right tokens."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.algorithm import GROUP_ADVANTAGES, LossAggregation
from configs.schema import AlgorithmConfig, Config, RolloutConfig
from rollout.buffer import mask_stale
from rollout.types import FloatArray, TrajectoryGroup, TurnReward, VersionSpan
from tests.support.reference import make_group, make_trajectory
from tests.support.sequences import with_sequence
from trainer.advantages.credit import (
    Credit,
    assign_credit,
    covariances,
    keeps_idle,
    needs_scores,
    select_tokens,
    trainable,
)
from trainer.tokens import sampled_tokens


def groups() -> list[TrajectoryGroup]:
    """Five loss tokens, of trajectories of 2, 1, 0 and 2."""
    return [
        make_group(0, [make_trajectory([1], [7, 8], reward=1.0), make_trajectory([1], [9], reward=0.0)]),
        make_group(
            1,
            [
                make_trajectory([2], [4], loss_mask=[False], reward=3.0),
                make_trajectory([2], [5, 6], rollout_logprobs=[-1, -5], reward=1.0),
            ],
        ),
    ]


def credit(
    scores: dict[str, FloatArray] | None = None,
    groups: Callable[[], list[TrajectoryGroup]] = groups,
    **algorithm: object,
) -> Credit:
    config = Config(
        algorithm=AlgorithmConfig(**algorithm),  # pyright: ignore[reportArgumentType]
        rollout=RolloutConfig(max_response_tokens=8),
    )
    return assign_credit(groups(), sampled_tokens(groups(), 3), scores or {}, config, 3)


def test_a_trajectorys_advantage_is_that_of_each_of_its_tokens() -> None:
    found = credit(normalize_by_std=False)
    assert [advantages.tolist() for advantages in found.advantages] == [[0.5, -0.5], [1, -1]]
    assert found.tokens.advantages.tolist() == [0.5, 0.5, -0.5, -1, -1]
    assert found.tokens.reference_logprobs is found.tokens.selected is None
    assert found.metrics == {}


@pytest.mark.parametrize("advantage", [*GROUP_ADVANTAGES, "reinforce_plus_plus"])
def test_an_episode_without_a_sequence_changes_nothing_for_the_others(advantage: str) -> None:
    """A harness that asked the policy for nothing: its reward has failed."""

    def with_an_idle_one() -> list[TrajectoryGroup]:
        first, second = groups()
        idle = replace(first.trajectories[0], sequences=(), reward=0.0, error="asked for nothing")
        return [replace(first, trajectories=(idle, *first.trajectories)), second]

    found, expected = credit(groups=with_an_idle_one, advantage=advantage), credit(advantage=advantage)
    assert found.tokens.advantages.tolist() == expected.tokens.advantages.tolist()
    assert found.tokens.loss_weights.tolist() == expected.tokens.loss_weights.tolist()
    assert [len(advantages) for advantages in found.advantages] == [3, 2] and found.advantages[0][0] == 0


def rewarded_by_turns() -> list[TrajectoryGroup]:
    """Turns of 1 and 2 tokens with rewards 2.5 and 1.5; one turn with 2; and a trajectory without turns."""
    whole = make_trajectory([1], [7, 8, 9, 6], loss_mask=[True, False, True, True], reward=4.0)
    two = with_sequence(whole, turn_rewards=(TurnReward(1, 2.5, 0), TurnReward(4, 1.5, 1)))
    one = with_sequence(make_trajectory([1], [5], reward=2.0), turn_rewards=(TurnReward(1, 2.0, 0),))
    return [make_group(0, [two, one, make_trajectory([1], [4, 3], reward=0.0)])]


def test_a_turn_learns_from_what_came_from_it_on() -> None:
    """The returns are 4, 2 and 0 from the first turn on, and 1.5, 0 and 0 from the second, since two trajectories
    had ended."""
    found = credit(groups=rewarded_by_turns, normalize_by_std=False)
    assert found.tokens.advantages.tolist() == [2, 1, 1, 0, -2, -2]
    assert [advantages.tolist() for advantages in found.advantages] == [pytest.approx([4 / 3, 0, -2])]
    other = credit(groups=rewarded_by_turns, normalize_by_std=False, advantage="rloo")
    assert other.tokens.advantages.tolist() == [3, 1.5, 1.5, 0, -3, -3]
    whole = credit(groups=rewarded_by_turns, normalize_by_std=False, turn_credit=False)
    assert whole.tokens.advantages.tolist() == [2, 2, 2, 0, -2, -2]


def delegating() -> list[TrajectoryGroup]:
    """A sub-agent is asked between the two turns of the main agent, which got 1 and 2. The other trajectory has as many
    turns, and got nothing."""
    main = make_trajectory([1], [7, 8, 9], loss_mask=[True, False, True], reward=3.0)
    sub = with_sequence(make_trajectory([2], [5]), turn_rewards=(TurnReward(1, 0.0, 1),))
    main = with_sequence(main, turn_rewards=(TurnReward(1, 1.0, 0), TurnReward(3, 2.0, 1)))
    idle = with_sequence(make_trajectory([1], [4, 3], reward=0.0), turn_rewards=(TurnReward(1, 0.0, 0),))
    return [make_group(0, [replace(main, sequences=(*main.sequences, *sub.sequences)), idle])]


def test_turns_are_in_the_order_of_time_also_across_branches() -> None:
    """The return is 3 from the first turn on, and 2 for the sub-agent, which came before the second turn of the main
    agent."""
    found = credit(groups=delegating, normalize_by_std=False, advantage="rloo")
    assert found.tokens.targets.tolist() == [7, 9, 5, 4, 3]
    assert found.tokens.advantages.tolist() == [3, 2, 2, -3, -2]


def branched() -> list[TrajectoryGroup]:
    """A trajectory of two sequences, of 2 and 1 loss tokens, beside one of 1."""
    first = make_trajectory([1], [7, 8], reward=1.0)
    second = make_trajectory([1, 7], [5, 6], loss_mask=[False, True])
    both = replace(first, sequences=(*first.sequences, *second.sequences))
    return [make_group(0, [both, make_trajectory([1], [9], reward=0.0)])]


def test_the_sequences_of_a_trajectory_learn_the_same_and_weigh_as_one() -> None:
    found = credit(groups=branched, normalize_by_std=False)
    assert found.tokens.targets.tolist() == [7, 8, 6, 9]
    assert found.tokens.advantages.tolist() == [0.5, 0.5, 0.5, -0.5]
    assert (found.tokens.trajectories.tolist(), found.tokens.sequences.tolist()) == ([0, 0, 0, 1], [0, 0, 1, 2])
    means = credit(groups=branched, loss_aggregation=LossAggregation.seq_mean_token_mean).tokens.loss_weights
    assert means.tolist() == pytest.approx([1 / 6] * 3 + [1 / 2])


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({}, [1 / 5] * 5),
        ({"loss": "gspo"}, [1 / 6, 1 / 6, 1 / 3, 1 / 6, 1 / 6]),
        ({"loss": "gspo", "loss_aggregation": LossAggregation.token_sum}, [1] * 5),
        ({"loss_aggregation": LossAggregation.seq_mean_token_sum_norm}, [1 / 24] * 5),
        ({"loss_aggregation": LossAggregation.seq_mean_token_sum_norm, "loss_horizon": 5}, [1 / 15] * 5),
    ],
)
def test_the_loss_has_an_aggregation_of_its_own_unless_told_otherwise(
    algorithm: dict[str, object], expected: list[float]
) -> None:
    assert credit(**algorithm).tokens.loss_weights.tolist() == pytest.approx(expected)


def test_the_kl_to_the_reference_is_taken_off_the_reward() -> None:
    """Penalties 0.5 * (0.25 + 0.75, -0.5, 0, 1 + 3): rewards 0.5, 0.25 and 3, -1."""
    kl = np.array([0.25, 0.75, -0.5, 1, 3], np.float32)
    reference = np.arange(5, dtype=np.float32)
    found = credit({"kl": kl, "reference_logprobs": reference}, kl_reward_coef=0.5, normalize_by_std=False)
    assert [advantages.tolist() for advantages in found.advantages] == [[0.125, -0.125], [2, -2]]
    assert found.tokens.advantages.tolist() == [0.125, 0.125, -0.125, -2, -2]
    assert found.metrics == {"actor/reward_kl_penalty": pytest.approx(4.5 / 5)}
    assert found.tokens.reference_logprobs is not None
    assert found.tokens.reference_logprobs.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("loss", ["kl_cov", "clip_cov"])
def test_tokens_are_selected_by_covariance_only_for_the_losses_that_need_it(loss: str) -> None:
    """Logprobs 0, 0, 0, -1, -5 and advantages 0.5, 0.5, -0.5, -1, -1: the last token stands out by far."""
    selected = credit(loss=loss, normalize_by_std=False).tokens.selected
    assert selected is not None and selected.tolist() == [False] * 4 + [True]
    assert credit(loss="ppo_clip").tokens.selected is None


def test_workers_are_asked_beforehand_only_for_a_kl_or_a_critic() -> None:
    assert not needs_scores(AlgorithmConfig())
    assert needs_scores(AlgorithmConfig(advantage="gae")) and keeps_idle(AlgorithmConfig(advantage="gae"))
    assert needs_scores(AlgorithmConfig(kl_loss_coef=0.1))
    assert needs_scores(AlgorithmConfig(kl_reward_coef=0.1))
    assert needs_scores(AlgorithmConfig(loss="m2po")) and needs_scores(AlgorithmConfig(advantage="otb"))


def test_without_an_advantage_a_trajectory_has_a_gradient_only_from_other_terms() -> None:
    assert not keeps_idle(AlgorithmConfig(kl_reward_coef=0.1))
    for key in ("entropy_coef", "kl_loss_coef", "kl_rollout_coef"):
        assert keeps_idle(AlgorithmConfig(**{key: 0.1}))


def test_gae_gives_every_token_an_advantage_and_the_critic_a_return() -> None:
    """Rewards 1, 0, 3, 1 at last tokens; with gamma = lambda = 1 they are the return of every token."""
    values = np.array([0.5, 0.25, 1, -1, 0], np.float32)
    found = credit({"values": values}, advantage="gae")
    estimates = np.array([0.5, 0.75, -1, 2, 1])
    whitened = (estimates - estimates.mean()) / estimates.std(ddof=1)
    assert found.tokens.returns is not None and found.tokens.values is not None
    assert found.tokens.values.tolist() == values.tolist()
    assert found.tokens.returns.tolist() == [1, 1, 0, 1, 1]
    assert found.tokens.advantages.tolist() == pytest.approx(whitened.tolist(), rel=1e-5)
    means = [whitened[:2].mean(), whitened[2], 0, whitened[3:].mean()]  # the third has no loss token
    assert np.concatenate(found.advantages).tolist() == pytest.approx(means, rel=1e-5)
    assert found.metrics == {
        "critic/values/mean": pytest.approx(0.15),
        "critic/returns/mean": pytest.approx(0.8),
        "critic/vf_explained_var": pytest.approx(1 - estimates.var() / 0.16, rel=1e-5),
    }


def test_with_a_critic_the_kl_is_taken_off_token_by_token() -> None:
    """Rewards 0, 1 | 0 | 0, 1 minus 0.5 kl; returns with gamma = lambda = 1 are the sums of what follows."""
    kl = np.array([1, 2, 3, 4, 6], np.float32)
    scores = {"values": np.zeros(5, np.float32), "kl": kl, "reference_logprobs": kl}
    found = credit(scores, advantage="gae", kl_reward_coef=0.5)
    assert found.tokens.returns is not None
    assert found.tokens.returns.tolist() == [-0.5 + 1 - 1, 1 - 1, -1.5, -2 + 1 - 3, 1 - 3]
    assert found.metrics["actor/reward_kl_penalty"] == pytest.approx(16 / 5)


def with_failures() -> list[TrajectoryGroup]:
    """Eight loss tokens, two in each trajectory. The second has no reward, the third was cut off."""
    return [
        make_group(
            0,
            [
                make_trajectory([1], [2, 3], reward=1.0, overlong_penalty=-0.5),
                make_trajectory([1], [4, 5], error="no"),
                make_trajectory([1], [6, 7], reward=0.5, finish_reason="length"),
                make_trajectory([1], [8, 9], reward=3.0),
            ],
        )
    ]


@pytest.mark.parametrize(
    ("mask_truncated", "targets", "advantages"),
    [
        (False, [2, 3, 6, 7, 8, 9], [-0.5, -0.5, -1, -1, 1.5, 1.5]),
        (True, [2, 3, 8, 9], [-0.5, -0.5, 1.5, 1.5]),
    ],
)
def test_only_what_is_trained_has_tokens_and_counts_in_the_loss(
    mask_truncated: bool, targets: list[int], advantages: list[float]
) -> None:
    """Rewards 0.5, none, 0.5 and 3 less the KL 0, (9), 0.5 and 0.5: 0.5, 0 and 2.5 around their mean of 1."""
    kl = np.array([0, 0, 9, 9, 0.25, 0.25, 0.5, 0], np.float32)
    scores = {"kl": kl, "reference_logprobs": np.arange(8, dtype=np.float32)}
    found = credit(scores, with_failures, kl_reward_coef=1.0, normalize_by_std=False, mask_truncated=mask_truncated)
    assert found.advantages[0].tolist() == [-0.5, 0, -1, 1.5]
    assert found.tokens.targets.tolist() == targets
    assert found.tokens.advantages.tolist() == advantages
    assert found.tokens.reference_logprobs is not None
    assert found.tokens.reference_logprobs.tolist() == [target - 2 for target in targets]
    assert found.tokens.loss_weights.tolist() == pytest.approx([1 / len(targets)] * len(targets))


def test_a_critic_learns_nothing_from_what_is_not_trained() -> None:
    values = np.array([0, 0, 50, 50, 60, 60, 0, 0], np.float32)
    found = credit({"values": values}, with_failures, advantage="gae", mask_truncated=True)
    assert found.tokens.returns is not None
    assert found.tokens.returns.tolist() == [0.5, 0.5, 3, 3]
    assert found.tokens.advantages.sum() == pytest.approx(0, abs=1e-6)
    assert found.advantages[0].tolist() == pytest.approx([-(3**0.5) / 2, 0, 0, 3**0.5 / 2])
    assert found.metrics["critic/values/mean"] == 0


@pytest.mark.parametrize(("mask_truncated", "kept"), [(False, [2, 2, 0, 0, 0]), (True, [2, 0, 0, 0, 0])])
def test_truncated_failed_and_aborted_trajectories_leave_the_loss(mask_truncated: bool, kept: list[int]) -> None:
    group = make_group(
        0,
        [
            make_trajectory([1], [2, 3], reward=1.0),
            make_trajectory([1], [2, 3], reward=0.0, finish_reason="length"),
            make_trajectory([1], [2, 3], error="no"),
            make_trajectory([1], [2, 3], reward=9.0, finish_reason="abort"),
            make_trajectory([1], [], spans=(), finish_reason="abort"),
        ],
    )
    (masked,) = trainable([group], mask_truncated)
    assert [trajectory.num_loss_tokens for trajectory in masked.trajectories] == kept
    assert [trajectory.num_loss_tokens for trajectory in group.trajectories] == [2, 2, 2, 2, 0], "the input stays"


# -- covariances -------------------------------------------------------------------------------------------------------


def test_covariances_by_hand() -> None:
    """Means -2 and 1."""
    found = covariances(np.array([-1, -3, -2, -2], np.float32), np.array([3, -1, 1, 1], np.float32))
    assert found.tolist() == [2, 2, 0, 0]
    assert covariances(np.array([-1, -3], np.float32), np.array([-1, 3], np.float32)).tolist() == [-2, -2]


SOME = np.array([5, 1, 3, 2, 4, 3, 0, -9], np.float32)


Selects = Callable[..., list[int]]


@pytest.fixture
def selected(monkeypatch: pytest.MonkeyPatch) -> Selects:
    def select(loss: str, ratio: float, low: float = 1.0, high: float = 5.0, seed: int = 0) -> list[int]:
        monkeypatch.setattr("trainer.advantages.credit.COV_RATIO", ratio)
        monkeypatch.setattr("trainer.advantages.credit.CLIP_COV_BOUNDS", (low, high))
        return np.flatnonzero(select_tokens(SOME, loss, np.random.default_rng(seed))).tolist()

    return select


def test_clip_cov_draws_from_between_its_bounds(selected: Selects) -> None:
    drawn = [selected("clip_cov", 0.25, seed=seed) for seed in range(40)]
    assert {len(tokens) for tokens in drawn} == {2}
    assert {token for tokens in drawn for token in tokens} == {2, 3, 4, 5}
    assert selected("clip_cov", 1.0, 2.5, 3.5) == [2, 5]
    assert selected("clip_cov", 1.0, 7.0, 9.0) == []
    assert len(selected("clip_cov", 1e-9)) == 1


def test_kl_cov_takes_the_largest(selected: Selects) -> None:
    assert selected("kl_cov", 0.4) == [0, 2, 4]
    assert selected("kl_cov", 1e-9) == [0]
    assert len(selected("kl_cov", 1.0)) == len(SOME)


def by_turns(*trajectories: Sequence[float]) -> list[TrajectoryGroup]:
    """A trajectory for each list of turn rewards, of one token a turn. Its reward is their sum, as environments add
    it up."""
    made = [
        with_sequence(
            make_trajectory([1], [2] * len(rewards), reward=sum(rewards)),
            turn_rewards=tuple(TurnReward(turn + 1, reward, turn) for turn, reward in enumerate(rewards)),
        )
        for rewards in trajectories
    ]
    return [make_group(0, made)]


WHERE_THE_LAST_TURN_IS_EQUAL = [
    [[200.1, 100.3, 7], [20.7, 3.9, 7], [11.3, 0.1, 7], [55.7, 3.3, 7]],
    [[10.1, 20.2, 0], [33.3, 0.7, 0]],
    [[0.1, 0.1, 0], [0.1, 0.1, 0], [0.3, 0.4, 0]],
    [[1e6 + 0.1, -1e6, 0.1], [0.0, 0.2, 0.1]],
    [[5, 0.1, 0.2], [7, 0.3, 0]],  # by the last two turns together
]


@pytest.mark.parametrize("advantage", ["grpo", "grpo_passk", "rloo", "opo", "gpg"])
@pytest.mark.parametrize("rewards", WHERE_THE_LAST_TURN_IS_EQUAL)
def test_rounding_of_earlier_turns_is_no_advantage(advantage: str, rewards: list[list[float]]) -> None:
    found = credit(groups=lambda: by_turns(*rewards), advantage=advantage)
    by_number = found.tokens.advantages.reshape(len(rewards), 3)
    assert by_number[:, 0].any()
    assert not by_number[:, 1 if rewards[0][0] == 5 else 2].any()
    assert credit(groups=lambda: by_turns([0.1, 0.2], [0.3, 0]), advantage=advantage).tokens.advantages[0] == 0


decimals = st.integers(0, 99_999).map(lambda cents: cents / 100)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(decimals, min_size=3, max_size=3), min_size=2, max_size=6), st.sampled_from([1e-3, 1, 1e3]))
def test_turns_are_credited_with_the_exact_return_to_go(hundredths: list[list[float]], scale: float) -> None:
    """The reference adds up fractions, and divides by the unbiased deviation in float64. The first turn brings every
    trajectory the same large number, which none of the later turns may feel."""
    rewards = [[1e6, *(value * scale for value in values)] for values in hundredths]
    found = credit(groups=lambda: by_turns(*rewards)).tokens.advantages.reshape(len(rewards), 4)
    for turn in range(4):
        returns = [sum(map(Fraction, values[turn:])) for values in rewards]
        mean = sum(returns) / len(returns)
        deviation = np.sqrt(float(sum((value - mean) ** 2 for value in returns) / (len(returns) - 1)))
        expected = [float(value - mean) / (deviation + 1e-6) for value in returns]
        assert found[:, turn].tolist() == pytest.approx(expected, abs=1e-5)


def test_a_large_offset_of_all_rewards_is_no_noise() -> None:
    rewards = [1e6 + 0.1, 1e6 + 0.2, 1e6 + 0.4]
    found = credit(groups=lambda: by_turns(*([reward] for reward in rewards)), normalize_by_std=False)
    assert found.tokens.advantages.tolist() == pytest.approx([-0.4 / 3, -0.1 / 3, 0.5 / 3], abs=1e-6)


@pytest.mark.parametrize("advantage", ["reinforce_plus_plus", "remax"])
def test_the_reward_of_a_stale_turn_reaches_no_later_token(advantage: str) -> None:
    """Turn 0 got 5 under old weights and is masked: turn 1 learns as if it had brought nothing."""

    def masked(first: float) -> list[TrajectoryGroup]:
        spans = (VersionSpan(0, 3, 0), VersionSpan(3, 6, 3))
        stale, other = make_trajectory([1], [2] * 6, reward=first + 1, spans=spans), make_trajectory([1], [3] * 3)
        stale = with_sequence(stale, turn_rewards=(TurnReward(3, first, 0), TurnReward(6, 1.0, 1)))
        group = make_group(0, [mask_stale(stale, lambda version: version > 2), other])
        return [replace(group, greedy=make_trajectory([1], [9]))]

    found = credit(groups=lambda: masked(5.0), advantage=advantage)
    expected = credit(groups=lambda: masked(0.0), advantage=advantage)
    assert found.tokens.advantages.tolist() == expected.tokens.advantages.tolist()
    assert found.tokens.targets.tolist() == [2] * 3 + [3] * 3
