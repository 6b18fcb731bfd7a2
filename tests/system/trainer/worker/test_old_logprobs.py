"""algorithm.proximal=exact: stale tokens scored by the weights that sampled them, against one sequence at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import register_fsdp_forward_method

from configs.algorithm import Proximal
from configs.model import LoraConfig
from configs.schema import AlgorithmConfig, Config, DType, Layout, ModelConfig, RolloutConfig, TrainerConfig
from configs.validate import ConfigError
from configs.weight_sync import InFlightKv, WeightSyncConfig
from rollout.types import FloatArray, Trajectory, TrajectoryGroup, VersionSpan
from tests.support.aged import aged, behaviour_logprobs, own_logprobs
from tests.support.fakes import make_order
from tests.support.reference import VOCAB_SIZE, branched_groups, double, random_groups
from tests.support.worker_runs import Inbox, Weights, free_master, on_ranks, pack, running_worker
from trainer.old_logprobs import MixedBatch, OldLogprobs, mixed_batch
from trainer.tiny.model import build_model
from trainer.tokens import TokenSignals, sampled_tokens
from trainer.worker import worker as worker_module
from trainer.worker.worker import TrainWorker

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("process_as_it_was")]
CONFIG = Config(
    algorithm=AlgorithmConfig(group_size=4, proximal=Proximal.exact),
    rollout=RolloutConfig(temperature=0.8, max_staleness=2),
    trainer=TrainerConfig(lr=1e-2, lr_warmup_steps=0, step_timeout_s=60.0),
)
NOW = 2
"""Steps taken before the batch is scored: versions 0 and 1 are old."""
EXACT = 1e-5


def learning(groups: Sequence[TrajectoryGroup]) -> TokenSignals:
    tokens = sampled_tokens(groups, NOW)
    return replace(tokens, advantages=np.ones_like(tokens.advantages))


def laid_out(groups: Sequence[TrajectoryGroup], config: Config = CONFIG) -> MixedBatch:
    mixed = mixed_batch(groups, learning(groups), config, NOW, measured_share=1)
    assert mixed is not None
    return mixed


def scored(worker: TrainWorker, mixed: MixedBatch) -> OldLogprobs:
    return mixed.gather([worker.old_logprobs(rows, mixed.versions) for rows in mixed.rows])


def train(worker: TrainWorker, inbox: Inbox, until: int = NOW) -> dict[int, Weights]:
    """Take steps on policy. Return the weights of every version, the last included."""
    groups = random_groups(double(build_model(VOCAB_SIZE, seed=0)), seed=9, temperature=0.8)
    weights: dict[int, Weights] = {}
    for step in range(until + 1):
        worker.publish(make_order(step))
        weights[step] = inbox.weights
        if step < until:
            worker.train_step(pack([groups], Layout.tree, 1)[0].micro_batches[0], step)
    return weights


def models_of(weights: dict[int, Weights]) -> Mapping[int, torch.nn.Module]:
    models = {version: build_model(VOCAB_SIZE, seed=0).eval() for version in weights}
    for version, model in models.items():
        assert not model.load_state_dict(weights[version], strict=False).unexpected_keys
        model.tie_weights()
    return models


def expected(groups: Sequence[TrajectoryGroup], function: Callable[..., FloatArray]) -> FloatArray:
    """Return [T] over the loss tokens."""
    sequences = [s for group in groups for trajectory in group.trajectories for s in trajectory.sequences]
    return np.concatenate([function(sequence)[sequence.loss_mask] for sequence in sequences])


@pytest.fixture(scope="module")
def groups() -> list[TrajectoryGroup]:
    model = double(build_model(VOCAB_SIZE, seed=0))
    plain = random_groups(model, seed=0, temperature=0.8) + branched_groups(model, seed=1, temperature=0.8)
    return aged(plain, [0, 1, NOW])


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("in_flight_kv", list(InFlightKv))
def test_stale_tokens_are_scored_as_they_were_sampled(
    layout: Layout, in_flight_kv: InFlightKv, model_path: str, groups: list[TrajectoryGroup]
) -> None:
    trainer = replace(CONFIG.trainer, layout=layout, tokens_per_micro_batch=64)
    config = replace(CONFIG, trainer=trainer, weight_sync=WeightSyncConfig(in_flight_kv=in_flight_kv))
    keeps_kv = in_flight_kv is InFlightKv.keep
    with running_worker(config, model_path) as (worker, inbox):
        models = models_of(train(worker, inbox))
        tokens = learning(groups)
        mixed = laid_out(groups, config)
        assert len(mixed.rows[0]) > 2
        old = scored(worker, mixed)
        behaviour = expected(groups, lambda s: behaviour_logprobs(models, s, 0.8, keeps_kv=keeps_kv))
        own = expected(groups, lambda s: own_logprobs(models, s, 0.8))
        known, measured = ~np.isnan(old.behaviour), ~np.isnan(old.own)
        assert not old.is_unknown.any()
        assert old.behaviour[known] == pytest.approx(behaviour[known], abs=EXACT)
        assert old.own[measured] == pytest.approx(own[measured], abs=EXACT)
        assert known[tokens.staleness > 0].all() and not known.all()  # what is left out is of the trainer's version
        assert behaviour[~known] == pytest.approx(own[~known], abs=EXACT)
        if keeps_kv:
            assert np.abs(old.own - old.behaviour)[measured].max() > 100 * EXACT  # or nothing has been compared
        else:
            assert not measured.any()


def test_the_weights_come_back_as_they_were(model_path: str, groups: list[TrajectoryGroup]) -> None:
    with running_worker(CONFIG, model_path) as (worker, inbox):
        before = train(worker, inbox)[NOW]
        scored(worker, laid_out(groups))
        worker.publish(make_order(NOW))
        assert all(torch.equal(inbox.weights[name], values) for name, values in before.items())


def test_the_three_parts_add_up(model_path: str, groups: list[TrajectoryGroup]) -> None:
    """Staleness, kept keys and values, and mismatch are what is between pi and mu, each computed by itself."""
    with running_worker(CONFIG, model_path) as (worker, inbox):
        models = models_of(train(worker, inbox))
        tokens = learning(groups)
        old = scored(worker, laid_out(groups))
        batch = pack([groups], Layout.tree, 1, budget=10_000)[0]
        now = batch.gather([worker.logprobs(batch.micro_batches[0])])
        measured = ~np.isnan(old.own) & (now != 0)
        own = expected(groups, lambda s: own_logprobs(models, s, 0.8))[measured]
        behaviour = expected(groups, lambda s: behaviour_logprobs(models, s, 0.8))[measured]
        current = expected(groups, lambda s: own_logprobs({v: models[NOW] for v in range(NOW + 1)}, s, 0.8))[measured]
        parts = {
            "staleness": (now[measured] - old.own[measured], current - own),
            "kept keys and values": (old.own[measured] - old.behaviour[measured], own - behaviour),
            "mismatch": (
                old.behaviour[measured] - tokens.rollout_logprobs[measured],
                behaviour - tokens.rollout_logprobs[measured],
            ),
        }
        assert measured.sum() > 20
        for part, independent in parts.values():
            assert part == pytest.approx(independent, abs=EXACT)
        total = sum(part for part, _ in parts.values())
        assert total == pytest.approx(now[measured] - tokens.rollout_logprobs[measured], abs=1e-6)


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_a_version_is_the_policy_that_the_trainer_had(
    dtype: DType, model_path: str, groups: list[TrajectoryGroup]
) -> None:
    """Whatever it computes in: what it said of tokens at version 1 is what it says of them when they are stale."""
    config = replace(CONFIG, trainer=replace(CONFIG.trainer, dtype=dtype, layout=Layout.packed))
    # None of these begins as another does, so each is a row by itself.
    first = [replace(group, trajectories=tuple(map(of_version_1, group.trajectories[1:]))) for group in groups[:4]]
    batch = pack([first], Layout.packed, 1, budget=1)[0]
    with running_worker(config, model_path) as (worker, inbox):
        train(worker, inbox, until=1)
        then = batch.gather([worker.logprobs(batch.micro_batches[0])])
        worker.train_step(batch.micro_batches[0], 1)
        lone = replace(config, trainer=replace(config.trainer, tokens_per_micro_batch=1))
        old = scored(worker, laid_out(first, lone))
        computed = then != 0
        assert (old.behaviour[computed] == then[computed]).all(), "bit for bit, a sequence in a row by itself"


def of_version_1(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory as version 1 sampled it, in one turn a sequence."""
    sequences = [
        replace(s, spans=(VersionSpan(0, len(s.response_ids), 1),), loss_mask=np.ones_like(s.loss_mask))
        for s in trajectory.sequences
    ]
    return replace(trajectory, sequences=tuple(sequences))


def test_a_worker_that_lost_its_versions_says_so(model_path: str, groups: list[TrajectoryGroup]) -> None:
    """As after a resume: it has the weights, and none of before."""
    with running_worker(CONFIG, model_path) as (worker, inbox):
        worker._global_steps = NOW
        old = scored(worker, laid_out(groups))
        tokens = learning(groups)
        assert old.is_unknown[tokens.staleness > 0].all()
        assert np.isnan(old.behaviour[old.is_unknown]).all() and np.isfinite(old.own[~np.isnan(old.own)]).all()
        filled = old.signals(tokens).old_logprobs
        assert filled is not None and (filled == tokens.rollout_logprobs)[old.is_unknown].all()


LORA = replace(CONFIG, model=ModelConfig(lora=LoraConfig(rank=4, alpha=8.0)))
OTHERS = {"two ranks": replace(CONFIG, trainer=replace(CONFIG.trainer, num_ranks=2, tokens_per_micro_batch=64))}
OTHERS["adapters on two ranks"] = replace(OTHERS["two ranks"], model=LORA.model)


def train_and_score(config: Config, model_path: str, groups: list[TrajectoryGroup], rank: int, master: str) -> Any:
    """Return one rank's outputs of rows, after the steps of `train`."""
    inbox = Inbox()
    worker = TrainWorker(config=config, device="cpu", make_sender=inbox)
    own = random_groups(double(build_model(VOCAB_SIZE, seed=0)), seed=9, temperature=0.8)
    num_ranks = config.trainer.num_ranks
    try:
        worker.setup(model_path, rank, num_ranks, master)
        for step in range(NOW):
            worker.train_step(pack([own], Layout.tree, num_ranks)[0].micro_batches[rank], step)
        mixed = laid_out(groups, config)
        outputs = worker.old_logprobs(mixed.rows[rank], mixed.versions)
        dist.barrier()  # rank 0 holds the store: it must not go first
        return outputs
    finally:
        dist.destroy_process_group()


def train_and_score_all(jobs: list[tuple[Config, str, list[TrajectoryGroup], str]], rank: int) -> list[Any]:
    return [train_and_score(config, path, groups, rank, master) for config, path, groups, master in jobs]


@pytest.fixture(scope="module")
def two_ranks(model_path: str, groups: list[TrajectoryGroup], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What both ranks say of each job of OTHERS."""
    jobs = [(config, model_path, groups, free_master()) for config in OTHERS.values()]
    answer = tmp_path_factory.mktemp("rank") / "answer.pickle"
    both = on_ranks(partial(train_and_score_all, jobs), 2, answer, 60)
    return {
        name: laid_out(groups, config).gather(outputs)
        for (name, config), *outputs in zip(OTHERS.items(), *both, strict=True)
    }


@pytest.mark.parametrize("name", OTHERS)
def test_two_ranks_say_what_a_single_one_says(
    name: str, two_ranks: dict[str, OldLogprobs], model_path: str, groups: list[TrajectoryGroup]
) -> None:
    alone = replace(OTHERS[name], trainer=replace(OTHERS[name].trainer, num_ranks=1))
    expected = laid_out(groups, alone).gather([train_and_score(alone, model_path, groups, 0, free_master())])
    found = two_ranks[name]
    assert np.isfinite(found.behaviour).sum() > 50
    np.testing.assert_allclose(found.behaviour, expected.behaviour, atol=1e-4)
    np.testing.assert_allclose(found.own, expected.own, atol=1e-4)


def test_adapters_are_what_changes_between_versions(model_path: str, groups: list[TrajectoryGroup]) -> None:
    with running_worker(LORA, model_path) as (worker, inbox):
        train(worker, inbox)
        assert worker._versions is not None
        assert worker._versions.nbytes < 3 * 4 * sum(p.numel() for p in worker._policy.parameters() if p.requires_grad)
        old, now = scored(worker, laid_out(groups)), pack([groups], Layout.tree, 1, budget=10_000)[0]
        current = now.gather([worker.logprobs(now.micro_batches[0])])
        stale = (learning(groups).staleness > 0) & (current != 0)
        assert np.abs(old.behaviour - current)[stale].max() > 1e-3
        assert np.abs(old.behaviour - current)[stale].mean() < 1


def test_a_model_whose_state_is_more_than_keys_and_values_is_refused(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a layer adds to every token what came before it in the input."""

    def accept(policy: Any, *_: Any) -> None:
        register_fsdp_forward_method(policy, "plain_logprobs")

    monkeypatch.setattr(worker_module, "refuse_other_logprobs", accept)
    prepare = worker_module.prepared

    def recurrent(causal_lm: Any, path: str, trainer: TrainerConfig) -> Any:
        layer = prepare(causal_lm, path, trainer).model.layers[0]
        layer.mlp.register_forward_hook(lambda module, inputs, output: output + inputs[0].cumsum(1))
        return causal_lm

    monkeypatch.setattr(worker_module, "prepared", recurrent)
    message = r"algorithm.proximal=exact: a row is computed in segments .* of Qwen"
    with pytest.raises(ConfigError, match=message), running_worker(CONFIG, model_path):
        pass
