"""TrainWorker with a reference policy, a critic and losses of whole trajectories, on one FSDP rank, on two, and on two
that share every row."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from configs.algorithm import Correction, LossAggregation, Proximal
from configs.schema import AlgorithmConfig, Config, CriticConfig, Layout, RolloutConfig, TrainerConfig
from rollout.types import FloatArray, TrajectoryGroup
from tests.support import batches
from tests.support.reference import (
    VOCAB_SIZE,
    ReferenceTrainer,
    branched_groups,
    double,
    loss_mask_of,
    random_groups,
    sequence_logprobs,
)
from tests.support.sequences import only
from tests.support.worker_runs import Job, Outcome, one_rank, two_ranks
from trainer.batch import StepBatch
from trainer.tiny.model import build_model
from trainer.worker.critic import ValueModel, clipped_value_loss

pytestmark = pytest.mark.usefixtures("process_as_it_was")
TIMEOUT_S = 60.0
TRAINER = TrainerConfig(lr=3e-3, lr_warmup_steps=2, weight_decay=0.1, max_grad_norm=0.05, step_timeout_s=TIMEOUT_S)
BONUSES = Config(
    algorithm=AlgorithmConfig(entropy_coef=0.05, kl_loss_coef=0.5),
    rollout=RolloutConfig(temperature=0.8),
    trainer=TRAINER,
)
SEQUENCES = replace(
    BONUSES,
    algorithm=AlgorithmConfig(loss="gspo", proximal=Proximal.current, correction=Correction.seq_is, importance_cap=1.5),
)
CRITIC = replace(BONUSES, algorithm=AlgorithmConfig(advantage="gae"), critic=CriticConfig(lr=3e-3, value_clip=0.1))


@pytest.fixture(scope="module")
def steps() -> list[list[TrajectoryGroup]]:
    """The trajectories of the second have branches."""
    model = double(build_model(VOCAB_SIZE, seed=0))
    kinds = [random_groups, branched_groups, random_groups]
    return [groups(model, seed=seed, temperature=0.8) for seed, groups in enumerate(kinds)]


def reference_logprobs(groups: Sequence[TrajectoryGroup]) -> FloatArray:
    """Of the first policy, by plain float64 forwards."""
    model = double(build_model(VOCAB_SIZE, seed=0))
    with torch.no_grad():
        values = [
            sequence_logprobs(model, trajectory, 0.8)[0][loss_mask_of(trajectory)].numpy()
            for group in groups
            for trajectory in group.trajectories
        ]
    return np.concatenate(values).astype(np.float32)


def with_reference(steps: list[list[TrajectoryGroup]], layout: Layout, num_ranks: int) -> list[StepBatch]:
    return [
        batches.pack(groups, layout, num_ranks, 48, keep_idle=True, reference_logprobs=reference_logprobs(groups))
        for groups in steps
    ]


def of_sequences(steps: list[list[TrajectoryGroup]], layout: Layout, num_ranks: int) -> list[StepBatch]:
    how = LossAggregation.seq_mean_token_mean
    return [batches.pack(groups, layout, num_ranks, 48, aggregation=how) for groups in steps]


def critic_signals(groups: Sequence[TrajectoryGroup]) -> dict[str, FloatArray]:
    """Any values and returns will do, if they depend on the token and on nothing else."""
    sequences = [s for group in groups for trajectory in group.trajectories for s in trajectory.sequences]
    returns = np.sin(np.concatenate([s.response_ids[s.loss_mask] for s in sequences])).astype(np.float32)
    return {"values": np.zeros_like(returns), "returns": returns}


def with_critic(steps: list[list[TrajectoryGroup]], layout: Layout, num_ranks: int) -> list[StepBatch]:
    return [batches.pack(g, layout, num_ranks, 48, keep_idle=True, **critic_signals(g)) for g in steps]


def sharing(config: Config) -> Config:
    return replace(config, trainer=replace(config.trainer, num_ranks=2, sequence_parallel=2))


@pytest.fixture(scope="module")
def on_two_ranks(
    steps: list[list[TrajectoryGroup]], model_path: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    jobs = {
        "bonuses": Job(BONUSES, model_path, with_reference(steps, Layout.tree, 2)),
        "sequences": Job(SEQUENCES, model_path, of_sequences(steps, Layout.packed, 2)),
        "critic": Job(CRITIC, model_path, with_critic(steps, Layout.tree, 2)),
        "bonuses of shared rows": Job(sharing(BONUSES), model_path, with_reference(steps, Layout.tree, 1)),
        "sequences of shared rows": Job(sharing(SEQUENCES), model_path, of_sequences(steps, Layout.packed, 1)),
        "critic of shared rows": Job(sharing(CRITIC), model_path, with_critic(steps, Layout.rows, 1)),
    }
    return two_ranks(jobs, tmp_path_factory.mktemp("rank") / "answer.pickle", TIMEOUT_S)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """As far as the weights moved at all."""
    assert found.keys() == expected.keys()
    for name, untrained in build_model(VOCAB_SIZE, seed=0).named_parameters():
        moved = expected[name].double() - untrained.detach().double()
        error = found[name].double() - expected[name].double()
        assert error.norm() < 1e-3 * moved.norm(), f"{name}: {error.norm() / moved.norm():.1e}"


@pytest.mark.parametrize("ranks", ["one", "two", "two that share rows"])
def test_entropy_bonus_and_kl_to_the_first_policy_are_those_of_the_plain_trainer(
    ranks: str, on_two_ranks: dict[str, Outcome], model_path: str, steps: list[list[TrajectoryGroup]]
) -> None:
    plain = ReferenceTrainer(build_model(VOCAB_SIZE, seed=0), BONUSES)
    expected = [plain.step(groups, step) for step, groups in enumerate(steps)]
    if ranks == "one":
        found = one_rank(Job(BONUSES, model_path, with_reference(steps, Layout.packed, 1)))
    else:
        found = on_two_ranks["bonuses" if ranks == "two" else "bonuses of shared rows"]
    assert_close(found.weights, {name: p.detach() for name, p in plain.model.named_parameters()})
    algorithm = BONUSES.algorithm
    for metrics, (loss, norm) in zip(found.metrics, expected, strict=True):
        parts = metrics["actor/pg_loss"] + algorithm.kl_loss_coef * metrics["actor/kl_loss"]
        assert parts - algorithm.entropy_coef * metrics["actor/entropy"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert found.metrics[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert found.metrics[-1]["actor/kl_loss"] > 1e-5
    # The reference stays the first policy. The KL is of the policy that sampled to it, by k1.
    reference = reference_logprobs(steps[-1])
    sampled = np.concatenate([only(t).rollout_logprobs[only(t).loss_mask] for g in steps[-1] for t in g.trajectories])
    np.testing.assert_allclose(found.scores["reference_logprobs"], reference, atol=1e-5)
    np.testing.assert_allclose(found.scores["kl"], sampled - reference, atol=1e-5)
    assert found.scores.keys() == {"reference_logprobs", "kl"}


def test_losses_of_whole_trajectories_do_not_depend_on_ranks_or_layout(
    on_two_ranks: dict[str, Outcome], model_path: str, steps: list[list[TrajectoryGroup]]
) -> None:
    expected = one_rank(Job(SEQUENCES, model_path, of_sequences(steps, Layout.tree, 1)))
    keys = expected.metrics[0].keys() - {"perf/trainer_busy_s", "perf/padded_tokens"}
    for found in (on_two_ranks["sequences"], on_two_ranks["sequences of shared rows"]):
        assert_close(found.weights, expected.weights)
        for ours, theirs in zip(found.metrics, expected.metrics, strict=True):
            same = pytest.approx({key: theirs[key] for key in keys}, rel=1e-3, abs=1e-5)
            assert {key: ours[key] for key in keys} == same
        assert found.scores == {}


class PlainCritic:
    """AdamW by torch on the whole value model, every token of the step in one loss."""

    def __init__(self, config: Config):
        causal_lm = build_model(VOCAB_SIZE, seed=0)
        self.model = ValueModel(causal_lm.model, causal_lm.config.hidden_size)
        self.config = config
        trainer = config.trainer
        betas = (trainer.adam_beta1, trainer.adam_beta2)
        self.adamw = torch.optim.AdamW(self.model.parameters(), betas=betas, weight_decay=trainer.weight_decay)

    def values(self, groups: Sequence[TrajectoryGroup]) -> torch.Tensor:
        (batch,) = batches.pack(groups, Layout.packed, keep_idle=True).micro_batches[0]
        order = torch.from_numpy(np.argsort(batch.index))
        return self.model(batch, torch.device("cpu"))[order]

    def step(self, groups: Sequence[TrajectoryGroup], global_steps: int) -> tuple[float, float]:
        signals: dict[str, Any] = {key: torch.from_numpy(value) for key, value in critic_signals(groups).items()}
        clip = self.config.critic.value_clip
        losses, _ = clipped_value_loss(self.values(groups), signals["values"], signals["returns"], clip)
        self.adamw.zero_grad()
        losses.mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.trainer.max_grad_norm)
        self.adamw.param_groups[0]["lr"] = self.config.critic.lr * min(1.0, (global_steps + 1) / 2)
        self.adamw.step()
        return losses.mean().item(), norm.item()


@pytest.mark.parametrize("ranks", ["one", "two", "two that share rows"])
def test_the_critic_learns_its_returns_as_a_plain_one_does(
    ranks: str, on_two_ranks: dict[str, Outcome], model_path: str, steps: list[list[TrajectoryGroup]]
) -> None:
    plain = PlainCritic(CRITIC)
    expected = [plain.step(groups, step) for step, groups in enumerate(steps)]
    if ranks == "one":
        found = one_rank(Job(CRITIC, model_path, with_critic(steps, Layout.packed, 1)))
    else:
        found = on_two_ranks["critic" if ranks == "two" else "critic of shared rows"]
    for metrics, (loss, norm) in zip(found.metrics, expected, strict=True):
        assert metrics["critic/vf_loss"] == pytest.approx(loss, rel=1e-4)
        assert metrics["critic/grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert [metrics["critic/lr"] for metrics in found.metrics] == [1.5e-3, 3e-3, 3e-3]
    assert any(metrics["critic/vf_clipfrac"] > 0 for metrics in found.metrics)
    values = plain.values(steps[-1]).detach().numpy()
    assert np.abs(values).max() > 0.1
    np.testing.assert_allclose(found.scores["values"], values, rtol=1e-3, atol=1e-4)
