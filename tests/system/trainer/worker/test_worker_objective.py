"""TrainWorker with a reference policy, a critic and losses of whole trajectories, on one FSDP rank, on two, and on two
that share every row."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from configs.algorithm import Correction, LossAggregation, Proximal
from configs.schema import AlgorithmConfig, Config, CriticConfig, Layout, RolloutConfig, TrainerConfig
from configs.trainer import ADAM_BETAS
from rollout.types import FloatArray, TrajectoryGroup
from tests.support import batches
from tests.support.reference import (
    VOCAB_SIZE,
    ReferenceTrainer,
    branched_groups,
    double,
    random_groups,
    sampled_logprobs,
)
from tests.support.sequences import only
from tests.support.worker_runs import Job, Outcome, assert_same_weights, one_rank, running_worker, two_ranks
from trainer.advantages.credit import m2po_outliers, trainable
from trainer.batch import StepBatch
from trainer.learning_rate import lr_factor
from trainer.step import StepAssembler
from trainer.tiny.model import build_model
from trainer.worker.critic import ValueModel, clipped_value_loss

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("process_as_it_was")]
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
SHORT_STEPS = replace(SEQUENCES, trainer=replace(TRAINER, scale_lr_by_ess=True))
BASELINE = replace(BONUSES, algorithm=AlgorithmConfig(loss="m2po", advantage="otb"))
CRITIC = replace(BONUSES, algorithm=AlgorithmConfig(advantage="gae"), critic=CriticConfig(lr=3e-3, value_clip=0.1))


@pytest.fixture(scope="module")
def steps() -> list[list[TrajectoryGroup]]:
    """The trajectories of the second have branches."""
    model = double(build_model(VOCAB_SIZE, seed=0))
    kinds = [random_groups, branched_groups, random_groups]
    return [groups(model, seed=seed, temperature=0.8) for seed, groups in enumerate(kinds)]


def reference_logprobs(groups: Sequence[TrajectoryGroup]) -> FloatArray:
    """Return those of the first policy."""
    return sampled_logprobs(double(build_model(VOCAB_SIZE, seed=0)), groups, 0.8)


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
        "short steps": Job(SHORT_STEPS, model_path, of_sequences(steps, Layout.packed, 2)),
        "baseline": Job(BASELINE, model_path, of_sequences(steps[-1:], Layout.packed, 2)),
        "baseline of shared rows": Job(sharing(BASELINE), model_path, of_sequences(steps[-1:], Layout.tree, 1)),
        "bonuses of shared rows": Job(sharing(BONUSES), model_path, with_reference(steps, Layout.tree, 1)),
        "sequences of shared rows": Job(sharing(SEQUENCES), model_path, of_sequences(steps, Layout.packed, 1)),
        "critic of shared rows": Job(sharing(CRITIC), model_path, with_critic(steps, Layout.rows, 1)),
    }
    return two_ranks(jobs, tmp_path_factory.mktemp("rank") / "answer.pickle", TIMEOUT_S)


@pytest.mark.parametrize("job", ["baseline", "baseline of shared rows"])
def test_the_policy_itself_is_scored_where_the_credit_reads_it(job: str, on_two_ranks: dict[str, Outcome]) -> None:
    """The squares of all probabilities are compared with the distributions in `check_next_token_logprobs`."""
    found = on_two_ranks[job]
    assert found.scores.keys() == {"logprobs", "squared_probabilities"}
    assert found.logprobs is not None
    np.testing.assert_array_equal(found.scores["logprobs"], found.logprobs)
    is_computed = found.logprobs != 0  # no token of a trajectory that has nothing to learn is in the batch
    squares = found.scores["squared_probabilities"]
    assert is_computed.any() and ((squares > 0) == is_computed).all() and (squares <= 1).all()


def test_a_step_is_assembled_from_what_the_policy_says_of_it(
    model_path: str, steps: list[list[TrajectoryGroup]]
) -> None:
    """m2po selects what a plain model in float64 says, and otb has advantages."""
    config = replace(BASELINE, algorithm=replace(BASELINE.algorithm, m2_threshold=0.05))
    with running_worker(config, model_path) as (worker, inbox):

        async def score(batch: StepBatch) -> dict[str, FloatArray]:
            (micro_batches,) = batch.micro_batches
            return {name: batch.gather([parts]) for name, parts in worker.score(micro_batches).items()}

        step = asyncio.run(StepAssembler(config=config, score=score).assemble(steps[0], 0))
        tokens, batch = step.credit.tokens, step.batch
        logprobs = sampled_logprobs(double(build_model(VOCAB_SIZE, seed=0)), steps[0], 0.8)
        expected = m2po_outliers(logprobs - tokens.rollout_logprobs, 0.05)
        assert tokens.selected is not None and 0 < expected.sum() < len(expected)
        np.testing.assert_array_equal(tokens.selected, expected)
        assert np.ptp(tokens.advantages) > 0.5 and batch is not None
        metrics = worker.train_step(batch.micro_batches[0], 0, batch.optimizer_steps).metrics
        assert metrics["actor/skipped_steps"].value == 0 and metrics["actor/grad_norm"].value > 0


def test_a_step_is_shortened_by_the_sample_size_of_all_ranks(on_two_ranks: dict[str, Outcome]) -> None:
    found, whole = on_two_ranks["short steps"].metrics, on_two_ranks["sequences"].metrics
    for step, metrics in enumerate(found):
        assert 0 < metrics["actor/sequence_ess"] < 0.9
        lr = TRAINER.lr * lr_factor(step, TRAINER) * metrics["actor/sequence_ess"] ** 0.5
        assert metrics["actor/lr"] == pytest.approx(lr, rel=1e-5)
    assert found[0]["actor/grad_norm"] == whole[0]["actor/grad_norm"]


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
    assert_same_weights(found.weights, {name: p.detach() for name, p in plain.model.named_parameters()})
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
        assert_same_weights(found.weights, expected.weights)
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
        weight_decay = config.trainer.weight_decay
        self.adamw = torch.optim.AdamW(self.model.parameters(), betas=ADAM_BETAS, weight_decay=weight_decay)

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


def test_a_critic_without_a_token_to_learn_reports_no_number_that_is_none(
    model_path: str, steps: list[list[TrajectoryGroup]]
) -> None:
    """As in a step whose every response was cut off, with algorithm.mask_truncated."""
    (idle,) = with_critic([trainable_none(steps[0])], Layout.packed, 1)
    (found,) = one_rank(Job(CRITIC, model_path, [idle])).metrics
    assert found["critic/vf_loss"] == 0
    assert not [name for name, value in found.items() if np.isnan(value)]


def trainable_none(groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
    cut_off = [
        replace(g, trajectories=tuple(replace(t, finish_reason="length") for t in g.trajectories)) for g in groups
    ]
    return trainable(cut_off, mask_truncated=True)
