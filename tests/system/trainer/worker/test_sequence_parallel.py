"""Rows shared by 2 and by 4 of four gloo ranks, sharded by FSDP2 over all of them, against one rank."""

from dataclasses import replace
from pathlib import Path

import pytest

from configs.schema import Config, Layout, RolloutConfig, TrainerConfig
from configs.validate import ConfigError
from rollout.types import TrajectoryGroup
from tests.support import batches, worker_runs
from tests.support.batches import ALGORITHMS
from tests.support.families import random_model
from tests.support.reference import VOCAB_SIZE, branched_groups, double, random_groups
from tests.support.worker_runs import Job, Outcome, assert_same_weights, one_rank
from trainer.batch import StepBatch
from trainer.tiny.model import build_model
from trainer.worker.attention.attention import Attention
from trainer.worker.attention.ulysses import SequenceGroup
from trainer.worker.model import Policy

pytestmark = pytest.mark.usefixtures("process_as_it_was")
TIMEOUT_S = 240.0
CONFIG = Config(
    algorithm=ALGORITHMS["everything at once"],
    rollout=RolloutConfig(temperature=0.8),
    trainer=TrainerConfig(lr=1e-2, lr_warmup_steps=2, weight_decay=0.1, max_grad_norm=0.05, step_timeout_s=TIMEOUT_S),
)


@pytest.fixture(scope="module")
def steps() -> list[list[TrajectoryGroup]]:
    """In the last, one group learns: a second group of ranks has nothing to do."""
    model = double(build_model(VOCAB_SIZE, seed=0))
    some = [groups(model, seed=seed, temperature=0.8) for seed, groups in enumerate((random_groups, branched_groups))]
    return [*some, some[0][:1]]


def packed(steps: list[list[TrajectoryGroup]], layout: Layout, num_groups: int) -> list[StepBatch]:
    return [batches.split(groups, CONFIG.algorithm, layout, num_groups, 48) for groups in steps]


def sharing(size: int, **changes: object) -> Config:
    trainer = replace(CONFIG.trainer, num_ranks=4, sequence_parallel=size, **changes)  # pyright: ignore
    return replace(CONFIG, trainer=trainer)


def assert_same(found: Outcome, expected: Outcome) -> None:
    keys = expected.metrics[0].keys() - {"perf/trainer_busy_s", "perf/padded_tokens"}
    for ours, theirs in zip(found.metrics, expected.metrics, strict=True):
        same = pytest.approx({key: theirs[key] for key in keys}, rel=1e-3, abs=1e-5, nan_ok=True)
        assert {key: ours[key] for key in keys} == same
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-4)
    assert_same_weights(found.weights, expected.weights)


@pytest.mark.slow
def test_ranks_that_share_rows_learn_as_one_does(
    steps: list[list[TrajectoryGroup]], model_path: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The model has four heads, with keys of two: among four ranks these are replicated."""
    jobs = {
        "two groups of two": Job(sharing(2), model_path, packed(steps, Layout.tree, 2)),
        "one of four": Job(sharing(4, gradient_checkpointing=True), model_path, packed(steps, Layout.packed, 1)),
    }
    answer = tmp_path_factory.mktemp("rank") / "answer.pickle"
    found = worker_runs.several_ranks(jobs, 4, answer, TIMEOUT_S)
    expected = one_rank(Job(CONFIG, model_path, packed(steps, Layout.tree, 1)))
    for outcome in found.values():
        assert_same(outcome, expected)
    first, *others = found["one of four"].ranks
    for other in others:  # all say the same, so that one may say it for all
        for ours, theirs in zip(first.metrics, other.metrics, strict=True):
            assert {k: m.value for k, m in ours.items() if k != "perf/trainer_busy_s"} == pytest.approx(
                {k: m.value for k, m in theirs.items() if k != "perf/trainer_busy_s"}, nan_ok=True
            )


@pytest.mark.parametrize(
    ("family", "size", "reason"),
    [
        ("llama", 3, "trainer.sequence_parallel=3: must divide the 4 attention heads of LlamaForCausalLM"),
        ("falcon", 2, "trainer.sequence_parallel=2: FalconForCausalLM has attention of its own, which ranks cannot"),
        ("gpt_oss", 2, "trainer.sequence_parallel=2: GptOssForCausalLM has attention of its own, which ranks cannot"),
    ],
)
def test_models_whose_attention_cannot_be_shared_are_refused(family: str, size: int, reason: str) -> None:
    attention = Attention(group=SequenceGroup(group=None, rank=0, size=size))  # pyright: ignore
    with pytest.raises(ConfigError, match=reason):
        Policy(random_model(family), 1.0, attention=attention)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["jamba", "qwen3_next"])
def test_a_state_that_runs_through_the_row_is_refused(family: str, tmp_path: Path) -> None:
    """Each rank would begin with none."""
    random_model(family).save_pretrained(tmp_path / "model")
    config = replace(CONFIG, trainer=replace(CONFIG.trainer, num_ranks=2, sequence_parallel=2, layout=Layout.rows))
    job = Job(config, str(tmp_path / "model"), [])
    with pytest.raises(ConfigError, match=r"layout=rows trainer.sequence_parallel=2: .*trainer.sequence_parallel=1$"):
        worker_runs.two_ranks({family: job}, tmp_path / "answer", TIMEOUT_S)
