"""TrainWorker over FSDP2 and gloo against a plain float64 trainer: loss, gradient norm, weights; one rank and two."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from configs.algorithm import Proximal
from configs.schema import AlgorithmConfig, Config, DType, Layout, RolloutConfig, TrainerConfig
from configs.trainer import GradientCheckpointing
from rollout.types import TrajectoryGroup
from tests.support import worker_runs
from tests.support.fakes import make_order
from tests.support.reference import (
    VOCAB_SIZE,
    ReferenceTrainer,
    branched_groups,
    double,
    learning_tokens,
    make_group,
    random_groups,
)
from tests.support.sequences import only, with_sequence
from tests.support.worker_runs import (
    Inbox,
    Job,
    Outcome,
    assert_same_metrics,
    assert_same_weights,
    free_master,
    one_rank,
    pack,
    running_worker,
)
from trainer.batch import MicroBatch, StepBatch
from trainer.metrics import Metric, merge_metrics, to_floats
from trainer.tiny.model import build_model
from trainer.tokens import sampled_tokens
from trainer.worker import token_logprobs
from trainer.worker.worker import TrainWorker

pytestmark = pytest.mark.usefixtures("process_as_it_was")
TIMEOUT_S = 60.0
CONFIG = Config(
    algorithm=AlgorithmConfig(group_size=4),
    rollout=RolloutConfig(temperature=0.8),
    trainer=TrainerConfig(lr=1e-2, lr_warmup_steps=2, weight_decay=0.1, max_grad_norm=0.05, step_timeout_s=TIMEOUT_S),
)
WITH_ENTROPY = replace(CONFIG, algorithm=replace(CONFIG.algorithm, entropy_coef=0.01))
WIDE = token_logprobs.COLUMNS + 100
"""A vocabulary of two chunks."""


@pytest.fixture(scope="module")
def wide_model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "wide"
    build_model(WIDE, seed=0).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def steps() -> list[list[TrajectoryGroup]]:
    """The groups of three steps; the trajectories of the second have branches, and the last has a single group to learn
    from, so a second rank has no work."""
    model = double(build_model(VOCAB_SIZE, seed=0))
    kinds = [random_groups, branched_groups, random_groups]
    some = [groups(model, seed=seed, temperature=CONFIG.rollout.temperature) for seed, groups in enumerate(kinds)]
    return [some[0], some[1], [some[2][0], some[2][-1]]]


@pytest.fixture(scope="module")
def reference(steps: list[list[TrajectoryGroup]]) -> Outcome:
    plain = ReferenceTrainer(build_model(VOCAB_SIZE, seed=0), CONFIG)
    results = [plain.step(groups, step) for step, groups in enumerate(steps)]
    return Outcome(
        [{"actor/pg_loss": loss, "actor/grad_norm": norm} for loss, norm in results],
        {name: parameter.detach() for name, parameter in plain.model.named_parameters()},
    )


@pytest.fixture(scope="module")
def two_ranks(
    steps: list[list[TrajectoryGroup]],
    model_path: str,
    wide_model_path: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Outcome]:
    jobs = {layout.value: Job(CONFIG, model_path, pack(steps, layout, 2)) for layout in Layout}
    always = replace(CONFIG, trainer=replace(CONFIG.trainer, unsharded_gradients_mb=0))
    jobs["reduced after every micro-batch"] = Job(always, model_path, pack(steps, Layout.packed, 2))
    jobs["two chunks"] = Job(WITH_ENTROPY, wide_model_path, pack(steps, Layout.tree, 2))
    return worker_runs.two_ranks(jobs, tmp_path_factory.mktemp("rank") / "answer.pickle", TIMEOUT_S)


def assert_same(found: Outcome, expected: Outcome, tolerance: float = 1e-4, vocabulary: int = VOCAB_SIZE) -> None:
    assert_same_metrics(found, expected, "actor/pg_loss", "actor/grad_norm", tolerance=tolerance)
    assert_same_weights(found.weights, expected.weights, tolerance, vocabulary)


@pytest.mark.parametrize("layout", list(Layout))
def test_one_rank_is_the_plain_trainer(
    layout: Layout, model_path: str, steps: list[list[TrajectoryGroup]], reference: Outcome
) -> None:
    assert_same(one_rank(Job(CONFIG, model_path, pack(steps, layout, 1))), reference)


@pytest.mark.parametrize("layout", list(Layout))
def test_two_ranks_are_the_plain_trainer(
    layout: Layout, two_ranks: dict[str, Outcome], steps: list[list[TrajectoryGroup]], reference: Outcome
) -> None:
    if layout is Layout.tree:  # one group to learn from: the second rank only takes part
        assert [len(b.index) for b in pack(steps, layout, 2)[-1].micro_batches[1]] == [0]
    assert_same(two_ranks[layout.value], reference)


def test_two_ranks_are_one_where_the_vocabulary_is_more_than_a_chunk(
    two_ranks: dict[str, Outcome], wide_model_path: str, steps: list[list[TrajectoryGroup]]
) -> None:
    """The embeddings are tied, and the entropy has a gradient."""
    alone = one_rank(Job(WITH_ENTROPY, wide_model_path, pack(steps, Layout.tree, 1)))
    assert_same(two_ranks["two chunks"], alone, vocabulary=WIDE)


def test_the_digest_of_the_weights_is_of_all_ranks_and_tells_their_bits(
    two_ranks: dict[str, Outcome], model_path: str, steps: list[list[TrajectoryGroup]]
) -> None:
    ranks = two_ranks["packed"].ranks
    assert ranks[0].digests == ranks[1].digests and len(set(ranks[0].digests)) == 1 + len(steps)
    alone, again = (one_rank(Job(CONFIG, model_path, pack(steps, Layout.packed, 1))).ranks[0] for _ in range(2))
    assert alone.digests == again.digests
    assert alone.digests[0] == ranks[0].digests[0], "the same weights, however many ranks hold them"


def test_gradients_may_be_reduced_after_every_micro_batch(
    two_ranks: dict[str, Outcome], model_path: str, steps: list[list[TrajectoryGroup]]
) -> None:
    assert len(pack(steps, Layout.packed, 2)[0].micro_batches[0]) > 1
    assert_same(two_ranks["reduced after every micro-batch"], two_ranks["packed"], tolerance=1e-5)


@pytest.mark.parametrize(("max_mb", "is_kept"), [(0, False), (1, True)])
def test_small_gradients_are_kept_whole_until_the_last_micro_batch(
    max_mb: int, is_kept: bool, model_path: str, steps: list[list[TrajectoryGroup]]
) -> None:
    config = replace(CONFIG, trainer=replace(CONFIG.trainer, unsharded_gradients_mb=max_mb))
    first, *rest = pack(steps, Layout.packed, 1)[0].micro_batches[0]
    assert rest
    seen: list[bool] = []
    with running_worker(config, model_path) as (worker, inbox):
        whole = worker.forward_backward

        def watched(batch: MicroBatch, before: torch.Tensor | None = None) -> tuple[dict[str, Metric], torch.Tensor]:
            result = whole(batch, before)
            seen.append(any(parameter.grad is not None for parameter in worker._policy.parameters()))
            return result

        worker.forward_backward = watched
        worker.train_step((first, *rest), 0)
    assert seen == [not is_kept] * len(rest) + [True]


@pytest.mark.parametrize("proximal", [proximal for proximal in Proximal if proximal is not Proximal.exact])
def test_metrics_by_their_definitions(proximal: Proximal, model_path: str, steps: list[list[TrajectoryGroup]]) -> None:
    """The means are over the tokens whose trajectories have an advantage, all in one micro-batch."""
    first, second, *rest = steps[0][0].trajectories
    surprising = with_sequence(
        second, rollout_logprobs=0 * only(second).rollout_logprobs
    )  # the largest difference is negative
    groups = [replace(steps[0][0], trajectories=(first, surprising, *rest)), *steps[0][1:]]
    config = replace(CONFIG, algorithm=AlgorithmConfig(proximal=proximal, importance_cap=1.1))
    batches = pack([groups], Layout.packed, 1, budget=10_000)
    metrics = one_rank(Job(config, model_path, batches)).metrics[0]
    model = build_model(VOCAB_SIZE, seed=0)
    log_ratios, entropy, advantages = learning_tokens(model, groups, CONFIG.rollout.temperature)
    log_ratio = torch.cat(log_ratios)
    assert -log_ratio.min() > log_ratio.max()
    products = torch.stack([own.sum() for own in log_ratios]).exp()
    ratio, follows = log_ratio.exp(), proximal is Proximal.current
    clipped = ((advantages > 0) & (ratio > 1.28)) | ((advantages < 0) & ((ratio < 0.8) | (ratio > 3)))
    assert 0 < clipped.double().mean() < 1
    assert {key: metrics[key] for key in metrics if key not in UNPREDICTABLE} == pytest.approx(
        {
            "actor/pg_clipfrac": 0 if follows else clipped.double().mean().item(),
            "actor/ppo_kl": 0 if follows else -log_ratio.mean().item(),
            "actor/entropy": entropy.mean().item(),
            "actor/importance_weight": ratio.clamp(max=1.1).mean().item() if follows else 1,
            "actor/rollout_kl": -log_ratio.mean().item(),
            "actor/rollout_logprob_diff_max": log_ratio.abs().max().item(),
            "actor/ess": (ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())).item(),
            "actor/sequence_ess": (products.sum() ** 2 / (len(products) * (products**2).sum())).item(),
            "correction/k3_kl": (ratio - 1 - log_ratio).mean().item(),
            "correction/ppl_ratio": sum(math.exp(-x.mean()) for x in log_ratios) / len(log_ratios),
            "correction/ratio_fraction_high": (ratio > 1.1).double().mean().item(),
            "correction/ratio_fraction_low": (ratio < 1 / 1.1).double().mean().item(),
            "actor/lr": 0.005,
            "actor/skipped_steps": 0,
            "trainer/optimizer_steps": 1,
            "perf/padded_tokens": batches[0].micro_batches[0][0].input_ids.size,
        },
        rel=1e-4,
        abs=1e-6,
    )


@pytest.mark.parametrize("layout", list(Layout))
def test_a_step_gives_back_what_it_made_of_every_token(
    layout: Layout, model_path: str, steps: list[list[TrajectoryGroup]]
) -> None:
    batch = pack([steps[0]], layout, 1)[0]
    log_ratios, _, _ = learning_tokens(build_model(VOCAB_SIZE, seed=0), steps[0], CONFIG.rollout.temperature)
    rollout_logprobs = sampled_tokens(steps[0], 0).rollout_logprobs
    with running_worker(CONFIG, model_path) as (worker, inbox):
        result = worker.train_step(batch.micro_batches[0], 0)
        tokens = result.tokens
        assert tokens is not None
        whole = batch.gather_trained([tokens])
        computed = ~np.isnan(whole.logprobs)
        assert computed.sum() == batch.num_trained < batch.num_tokens
        log_ratio = whole.logprobs[computed] - rollout_logprobs[computed]
        assert log_ratio == pytest.approx(torch.cat(log_ratios).detach().numpy(), abs=1e-4)
        assert (whole.advantages[computed] != 0).all() and (whole.advantages[~computed] == 0).all()
        assert 0 < tokens.is_clipped.mean() == pytest.approx(result.metrics["actor/pg_clipfrac"].value)
        assert not tokens.is_rejected.any()


UNPREDICTABLE = ("actor/pg_loss", "actor/grad_norm", "perf/trainer_busy_s")  # the first two are tested above


def test_compute_in_bfloat16_as_on_gpus_is_close_and_keeps_float32_master_weights(
    model_path: str, steps: list[list[TrajectoryGroup]], reference: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_logprobs, "CHUNK_LOGITS", {"cpu": 5 * VOCAB_SIZE})
    config = replace(
        CONFIG, trainer=replace(CONFIG.trainer, dtype=DType.bfloat16, gradient_checkpointing=GradientCheckpointing.full)
    )
    found = one_rank(Job(config, model_path, pack(steps[:1], Layout.packed, 1)))
    norm = reference.metrics[0]["actor/grad_norm"]
    assert found.metrics[0]["actor/grad_norm"] == pytest.approx(norm, rel=0.05)
    assert found.metrics[0]["actor/grad_norm"] != pytest.approx(norm, rel=1e-5)
    assert any((weight != weight.to(torch.bfloat16)).any() for weight in found.weights.values())


def test_publish_yields_the_models_weights_in_the_rollouts_dtype(
    model_path: str, steps: list[list[TrajectoryGroup]]
) -> None:
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, dtype=DType.bfloat16))
    batch = pack(steps, Layout.tree, 1)[0]
    with running_worker(config, model_path) as (worker, inbox):
        assert worker.publish(make_order(0)).global_steps == 0
        untrained = build_model(VOCAB_SIZE, seed=0)
        expected = {name: tensor.detach().to(torch.bfloat16) for name, tensor in untrained.named_parameters()}
        assert inbox.weights.keys() == expected.keys()
        assert all(torch.equal(inbox.weights[name], tensor) for name, tensor in expected.items())
        worker.train_step(batch.micro_batches[0], 0)
        worker.publish(make_order(1))
        assert any(not torch.equal(inbox.weights[name], tensor) for name, tensor in expected.items())


def test_a_step_without_anything_to_learn_moves_nothing_and_gradients_are_cleared_after_each(
    model_path: str, steps: list[list[TrajectoryGroup]]
) -> None:
    trainer_config = replace(CONFIG.trainer, lr=0.5, lr_warmup_steps=4, weight_decay=0.0, max_grad_norm=1e9)
    config = replace(CONFIG, trainer=trainer_config)
    solved = make_group(0, [steps[0][-1].trajectories[1]] * 2)
    empty, full = pack([[solved], steps[0]], Layout.tree, 1)
    with running_worker(config, model_path) as (worker, inbox):
        metrics = to_floats(worker.train_step(empty.micro_batches[0], 0).metrics)
        assert metrics["actor/pg_loss"] == metrics["actor/grad_norm"] == 0
        worker.publish(make_order(0))
        untrained = dict(build_model(VOCAB_SIZE, seed=0).named_parameters())
        assert all(torch.equal(inbox.weights[name], tensor) for name, tensor in untrained.items())
        # Gradients are cleared after a step: two calls see the same weights' gradient, not the sum.
        norms = [
            to_floats(merge_metrics([*forward_backward(worker, full), worker.optim_step(-1)]))["actor/grad_norm"]
            for _ in range(2)  # the step of learning rate 0 leaves the weights where they are
        ]
        assert norms[0] == pytest.approx(norms[1], rel=1e-6) and norms[0] > 0


def forward_backward(worker: TrainWorker, batch: StepBatch) -> list[dict[str, Metric]]:
    return [worker.forward_backward(micro_batch)[0] for micro_batch in batch.micro_batches[0]]


def test_a_second_rank_that_never_comes_is_an_error_within_the_deadline(model_path: str) -> None:
    config = replace(CONFIG, trainer=replace(CONFIG.trainer, start_timeout_s=4.0))
    worker = TrainWorker(config=config, device="cpu", make_sender=Inbox())
    with pytest.raises(TimeoutError, match="^train worker 1 on b did not come to 127.0.0.1:[0-9]+ within 1 s"):
        worker.setup(model_path, 0, 2, free_master(), ["on a", "on b"])
