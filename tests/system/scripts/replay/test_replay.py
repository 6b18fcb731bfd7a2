"""Runs are taken again by real train workers, bit for bit, whatever they were trained with and how often they ended."""

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Qwen3ForCausalLM

from configs.schema import Config
from configs.validate import ConfigError
from rollout.types import TokenSequence, TrajectoryGroup, VersionSpan
from scripts.launch.conversations import encode_conversations, load_all
from scripts.observe.run import Run
from scripts.replay.plan import make_plan
from scripts.replay.replay import Replay, sentence
from tests.support.compose import resolve
from tests.support.recorded_training import RecordedTraining
from tests.support.reference import branched_groups, double, random_groups
from tests.support.sequences import only, with_sequence
from trainer.supervised.demonstrations import DemonstrationStream
from trainer.tracking.sinks import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

STEPS = 6
SMALL = f"""
device=cpu trainer.total_steps={STEPS} trainer.prompts_per_step=4 algorithm.group_size=4 checkpoint.every=2
checkpoint.keep_last=9 trainer.tokens_per_micro_batch=48 trainer.lr=3e-3 tracking.sinks=[jsonl]
""".split()
EVERY_PART = (
    *("algorithm.advantage=gae", "algorithm.loss=gspo", "algorithm.proximal=interpolated", "critic.lr=1e-3"),
    *("algorithm.correction=seq_is_rs", "algorithm.entropy_coef=0.001"),
    *("algorithm.kl_loss_coef=0.1", "algorithm.kl_reward_coef=0.1"),
)
"""A critic, a reference in loss and reward, an entropy bonus, and a correction."""
CASES: Mapping[str, Sequence[str]] = {
    "ranks": ["trainer.num_ranks=2", "trainer.mini_batches=2", "trainer.epochs=2", *EVERY_PART],
    "lora": ["model.lora.rank=4", "model.lora.dropout=0.2", "trainer.layout=packed", "algorithm.kl_loss_coef=0.05"],
}


def config_of(model: Path, *overrides: str) -> Config:
    return resolve(*SMALL, "model.kind=hf", f"model.path={model}", *overrides)


@pytest.fixture(scope="module")
def steps(tiny_model: Path) -> dict[int, list[TrajectoryGroup]]:
    """Groups with branches in every second step. A logprob of step 5 is not finite: it is skipped."""
    model = double(Qwen3ForCausalLM.from_pretrained(tiny_model))
    made = {step: (random_groups, branched_groups)[step % 2](model, seed=step) for step in range(STEPS)}
    group = made[4][0]
    whole, other, *rest = group.trajectories
    length = len(only(other).response_ids)
    broken = with_sequence(
        other, rollout_logprobs=np.full(length, -np.inf, np.float32), loss_mask=np.ones(length, np.bool_)
    )
    made[4][0] = replace(group, trajectories=(whole, broken, *rest))
    return {step: [as_sampled(group, step) for group in groups] for step, groups in made.items()}


def as_sampled(group: TrajectoryGroup, step: int) -> TrajectoryGroup:
    """The group with an ordinal of its step, whose loss tokens were sampled by the two versions before the step."""
    trajectories = tuple(
        replace(trajectory, sequences=tuple(with_spans(sequence, step) for sequence in trajectory.sequences))
        for trajectory in group.trajectories
    )
    return replace(
        group, prompt=replace(group.prompt, ordinal=4 * step + group.prompt.ordinal), trajectories=trajectories
    )


def with_spans(sequence: TokenSequence, step: int) -> TokenSequence:
    places = np.flatnonzero(sequence.loss_mask).tolist()
    half = len(places) // 2
    versions = [max(step - 1, 0)] * half + [step] * (len(places) - half)
    spans = (VersionSpan(place, place + 1, version) for place, version in zip(places, versions, strict=True))
    return replace(sequence, spans=tuple(spans))


def record(training: RecordedTraining, config: Config, *ends: tuple[int, Config]) -> Run:
    """Record a run. `ends`: the steps before which its processes are killed, each with the config of the next one."""

    async def processes() -> None:
        now = config
        for ends_at, following in ends:
            await training.train(now, ends_at)
            now = following
        await training.train(now)

    asyncio.run(processes())
    return Run.open(training.run_dir)


@pytest.fixture(scope="module")
def default_run(
    ray_cluster: None, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, steps: dict[int, Any]
) -> Run:
    training = RecordedTraining(tmp_path_factory.mktemp("default") / "run", tiny_model, steps)
    return record(training, config_of(tiny_model))


def replayed(run: Run, *changes: str, first: int | None = None, checkpoint: Path | None = None) -> Any:
    """Return the outcome of a replay, with what was told of it, and its folder."""
    plan = make_plan(run, first=first, last=None, checkpoint=checkpoint)
    folder = run.folder / "replays" / (changes[0] if changes else "exact")
    folder.mkdir(parents=True, exist_ok=True)
    told: list[str] = []
    varied = plan.changed(changes) if changes else None
    replay = Replay(plan=plan, device="cpu", folder=folder, report=told.append, varied=varied)
    return asyncio.run(replay.take_all()) | {"told": told, "folder": folder}


def check_equal(outcome: Any, steps: int = STEPS) -> None:
    assert outcome["equality_expected"], outcome["reasons"]
    assert (outcome["steps"], outcome["equal"], outcome["differing"]) == (steps, steps, 0), outcome["told"]
    assert sentence(outcome) == f"replay of run: all {steps} steps gave the run's weights, bit for bit"


def test_every_step_of_the_default_layout_gives_the_weights_of_the_run(default_run: Run) -> None:
    outcome = replayed(default_run)
    check_equal(outcome)
    assert outcome["told"][0].startswith("step 1: the weights are equal, ")
    weights = [
        line["weights"] for line in map(json.loads, (default_run.folder / "proof.jsonl").open()) if "weights" in line
    ]
    assert weights[-1] == outcome["weights"] and len(set(weights)) == STEPS - 1, "a step was skipped"
    rows = read_metrics(outcome["folder"] / "metrics.jsonl")
    assert [row["replay/weights_equal"] for row in rows] == [1.0] * STEPS
    assert {row.get("replay/logprob_difference", 0.0) for row in rows} == {0.0}


@pytest.mark.parametrize("case", CASES)
def test_every_step_gives_the_weights_of_the_run(
    tmp_path: Path, tiny_model: Path, steps: dict[int, Any], case: str
) -> None:
    """The run of two ranks ends three times before its end, and goes on with another learning rate, as a user may."""
    config = config_of(tiny_model, *CASES[case])
    slower = replace(config, trainer=replace(config.trainer, lr=1e-3))
    ends = [(3, slower), (5, slower), (4, slower)] if case == "ranks" else []
    run = record(RecordedTraining(tmp_path / "run", tiny_model, steps), config, *ends)
    check_equal(replayed(run))


def test_conversations_beside_the_rollouts_are_learned_again(
    tmp_path: Path, tiny_model: Path, steps: dict[int, Any]
) -> None:
    """They are read and encoded anew; which of them a step learns follows from the step."""
    changes = ("model.warmup_steps=0", "algorithm.ce_coef=0.5", "sft.per_step=3", "trainer.mini_batches=2")
    config = resolve(*SMALL, *changes, "data.num_train=40")
    run_dir = tmp_path / "run"
    shutil.copytree(tiny_model, run_dir / "untrained_model")
    learned = asyncio.run(encode_conversations(config, str(tiny_model), load_all(config)))
    stream = DemonstrationStream(learned.train, config.seed)
    run = record(RecordedTraining(run_dir, tiny_model, steps, stream), config)
    outcome = replayed(run)
    assert outcome["start"] == str(run_dir / "untrained_model")
    check_equal(outcome)
    rows = read_metrics(outcome["folder"] / "metrics.jsonl")
    assert all(row["actor/ce_tokens"] > 0 for row in rows if row["step"] != 5)


def test_a_checkpoint_is_a_start_as_well_as_the_first_policy(default_run: Run, tiny_model: Path) -> None:
    outcome = replayed(default_run, first=4)
    assert outcome["start"].endswith("checkpoints/step_000002")
    check_equal(outcome, steps=3)
    store = default_run.folder / "checkpoints"
    with pytest.raises(ConfigError, match="those of the run had .* after step 2: they are others"):
        (store / "elsewhere").mkdir()
        wrong = make_plan(default_run, first=4, last=None, checkpoint=store / "step_000002")
        assert wrong.checkpoint is not None
        other = replace(wrong.checkpoint, path=store / "step_000004")
        replay = Replay(
            plan=replace(wrong, checkpoint=other), device="cpu", folder=default_run.folder, report=[].append
        )
        asyncio.run(replay.take_all())


def test_a_record_that_was_changed_is_where_the_weights_differ_from_then_on(
    default_run: Run, tmp_path: Path, tiny_model: Path
) -> None:
    """The reward of one trajectory of step 3 is another. The replay goes on and bounds the difference."""
    copy = tmp_path / "run"
    shutil.copytree(default_run.folder, copy)
    run = Run.open(copy)
    arrays = run.tokens(3)
    arrays["rewards"][0] += 0.25
    np.savez(run.tokens_path(3), **arrays)
    outcome = replayed(run)
    assert (outcome["equal"], outcome["differing"]) == (2, 4)
    first = outcome["first_difference"]
    assert (first["step"], first["advantages_equal"], first["logprobs_equal"]) == (3, False, True)
    assert 0 < outcome["logprob_difference"] < 1
    assert sorted(outcome["policy_differences"]) == ["4", "6"]
    assert all(0 < each["relative"] < 0.1 for each in outcome["policy_differences"].values())
    assert "2 of 6 steps are equal, the first that differs is 3" in sentence(outcome)
    told = next(text for text in outcome["told"] if text.startswith("step 3"))
    assert told == "step 3: the weights differ; the advantages are different, the trainer's logprobs equal"


def test_on_another_machine_it_says_first_that_bits_may_differ_and_bounds_the_difference(
    default_run: Run, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(default_run.folder, copy)
    first, *rest = (copy / "proof.jsonl").read_text().splitlines()
    beginning = json.loads(first)
    beginning["origin"]["device"] = "another"
    step = json.loads(rest[1]) | {"weights": "0" * 16}  # as if the other machine had rounded otherwise
    lines = [json.dumps(beginning), rest[0], json.dumps(step), *rest[2:]]
    (copy / "proof.jsonl").write_text("".join(f"{line}\n" for line in lines))
    outcome = replayed(Run.open(copy))
    assert not outcome["equality_expected"] and outcome["told"][0].startswith(
        "equal bits cannot be expected (device another, here "
    )
    assert (outcome["equal"], outcome["differing"], outcome["logprob_difference"]) == (STEPS - 1, 1, 0)
    assert outcome["policy_differences"] == {"2": {"largest": 0.0, "relative": 0.0}}


def test_other_values_teach_something_else_from_the_same_rollouts(default_run: Run) -> None:
    same = replayed(default_run, "trainer.max_skipped_steps=4")
    rows = read_metrics(same["folder"] / "metrics.jsonl")
    taken = [row for row in rows if row["step"] != 5]
    assert all(row["replay/gradient_cosine"] == pytest.approx(1) for row in taken)
    assert all(row["replay/weights_distance"] == 0 == row["replay/logprob_difference"] for row in taken)
    rejection = ("algorithm.rejection=token_k1", "algorithm.rejection_low=0.8", "algorithm.rejection_high=1.2")
    other = replayed(default_run, "algorithm.loss=gspo", *rejection, "trainer.lr=1e-3")
    rows = read_metrics(other["folder"] / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    cosines = [row["replay/gradient_cosine"] for row in rows if row["step"] != 5]
    assert all(-1 < cosine < 0.9999 for cosine in cosines) and "replay/gradient_cosine" not in rows[4]
    assert rows[0]["replay/logprob_difference"] == 0 < rows[1]["replay/logprob_difference"]
    assert all(0.05 < row["replay/weights_distance"] < 2 for row in rows if row["step"] != 5)
    assert {"actor/ess", "actor/pg_clipfrac"} <= rows[0].keys()
    assert all(0 < row["replay/masked_fraction"] < 1 for row in rows if row["step"] != 5)
    assert (other["equal"], other["differing"]) == (STEPS, 0), "the original was taken beside it"
