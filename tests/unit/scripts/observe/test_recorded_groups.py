"""Groups that are read back from a run's records are those that were trained, to the bit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.algorithm import AlgorithmConfig
from configs.schema import Config
from rollout.types import TokenSequence, Trajectory, TrajectoryGroup, TurnReward, VersionSpan
from scripts.observe.files import RunError
from scripts.observe.proof import _array_digests
from scripts.observe.recorded_groups import read_step
from scripts.observe.run import Run
from tests.support.fakes import make_prompt
from tests.support.kept import kept_of
from tests.support.reference import VOCAB_SIZE
from tests.support.routes import rows_of, some_routes
from trainer.advantages.credit import assign_credit
from trainer.tokens import TokenSignals, TrainedTokens, sampled_tokens
from trainer.tracking.proof import trajectory_proofs
from trainer.tracking.trajectories import TRAJECTORIES, to_lines, token_arrays, trajectory_records

STEP = 7
ADVANTAGES = ("grpo", "rloo", "reinforce_plus_plus", "remax", "opd")


def sequence(random: np.random.Generator, seed: int) -> TokenSequence:
    length, is_truncated = int(random.integers(0, 9)), seed % 2 == 1
    mask = random.random(length) < 0.7
    half = length // 2
    return TokenSequence(
        prompt_ids=random.integers(0, VOCAB_SIZE, random.integers(1, 6)).astype(np.int32),
        response_ids=random.integers(0, VOCAB_SIZE, length).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -random.random(length), 0).astype(np.float32),
        spans=tuple(span for span in (VersionSpan(0, half, 4), VersionSpan(half, length, 6)) if span.end > span.start),
        teacher_logprobs=-random.random(length).astype(np.float32),
        turn_rewards=(TurnReward(half, 0.1, 0), TurnReward(length, 0.2, 1)) if length else (),
        kept=kept_of([range(random.integers(0, 4)) for _ in range(length)]) if is_truncated else None,
        routes=some_routes(random.integers(0, 40, length).tolist()) if seed > 1 and random.random() < 0.7 else None,
    )


def trajectory(random: np.random.Generator, seed: int) -> Trajectory:
    return Trajectory(
        sequences=tuple(sequence(random, seed) for _ in range(random.integers(0, 4))),
        reward=float(random.normal()) * 10.0 ** random.integers(-9, 9),
        finish_reason=str(random.choice(["stop", "length", "abort"])),
        text="half a pair \ud800, a line \u2028 break",
        replica="replica-1",
        overlong_penalty=-float(random.random()),
        error=None if random.random() < 0.8 else "the reward failed",
    )


def with_whole_routes(group: TrajectoryGroup, seed: int) -> TrajectoryGroup:
    """Let every sequence that has a token say all of its experts, which begin alike, and the group have those of
    prompts once."""
    random = np.random.default_rng(seed)

    def routed(sequence: TokenSequence) -> TokenSequence:
        rows = np.where(random.random(sequence.num_inputs) < 0.9, 3, 5).tolist()
        return replace(sequence, routes=some_routes(rows)) if rows else replace(sequence, routes=None)

    trajectories = (replace(some, sequences=tuple(map(routed, some.sequences))) for some in group.trajectories)
    return replace(group, trajectories=tuple(trajectories)).with_shared_routes()


def random_groups(seed: int) -> list[TrajectoryGroup]:
    """With an odd seed, sampling has left tokens out; from 2 on, some sequences say their experts, and from 4 on all,
    and those of their prompts once."""
    groups = plain_groups(seed)
    return [with_whole_routes(group, seed) for group in groups] if seed >= 4 else groups


def plain_groups(seed: int) -> list[TrajectoryGroup]:
    random = np.random.default_rng(seed)
    return [
        TrajectoryGroup(
            prompt=make_prompt(ordinal),
            trajectories=tuple(trajectory(random, seed) for _ in range(4)),
            greedy=trajectory(random, seed) if random.random() < 0.8 else None,
        )
        for ordinal in (12, 3, 40)
    ]


def record(folder: Path, groups: Sequence[TrajectoryGroup]) -> Run:
    """Write the step as a run does."""
    advantages = [np.zeros(len(group.trajectories), np.float32) for group in groups]
    records = [line for group in groups for line in trajectory_records(group.prompt, group.trajectories, [0.0] * 4)]
    path = folder / TRAJECTORIES / f"step_{STEP:06d}.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(to_lines(records))
    tokens = TrainedTokens.none(len(sampled_tokens(groups, 6).targets))
    path.with_suffix(".npz").write_bytes(token_arrays(groups, advantages, tokens))
    return Run.open(folder)


def bits(tokens: TokenSignals) -> dict[str, Any]:
    arrays: dict[str, Any] = tokens._arrays()
    if tokens.kept is not None:
        arrays |= {"kept_counts": tokens.kept.counts, "kept_ids": tokens.kept.token_ids}
    return {name: (array.dtype.str, array.tobytes()) for name, array in arrays.items()}


def experts(groups: Sequence[TrajectoryGroup]) -> list[list[int | None]]:
    return [rows_of(each.input_routes) for group in groups for some in group.trajectories for each in some.sequences]


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("seed", range(6))
def test_all_that_training_reads_comes_back_to_the_bit(tmp_path: Path, seed: int, advantage: str) -> None:
    groups = random_groups(seed)
    read = list(read_step(record(tmp_path, groups), STEP).groups)
    config = Config(algorithm=AlgorithmConfig(advantage=advantage))
    if advantage == "opd":
        config = replace(config, teacher=replace(config.teacher, path="teacher"))
    theirs, ours = (
        assign_credit(some, sampled_tokens(some, STEP - 1), {}, config, STEP - 1) for some in (groups, read)
    )
    assert bits(ours.tokens) == bits(theirs.tokens) and len(ours.tokens.targets) > 0
    assert bits(sampled_tokens(read, STEP - 1)) == bits(sampled_tokens(groups, STEP - 1))
    assert [each.prompt.ordinal for each in read] == [12, 3, 40]
    arrays = Run.open(tmp_path).tokens(STEP)
    assert (arrays["format"], "kept_counts" in arrays) == ([2, 3, 4, 4, 5, 5][seed], seed % 2 == 1)
    assert experts(read) == experts(groups) and any(experts(read)) == (seed > 1)
    assert token_arrays(read, [np.zeros(4, np.float32)] * 3) == token_arrays(groups, [np.zeros(4, np.float32)] * 3)
    proofs = trajectory_proofs(groups, [np.zeros(4, np.float32)] * len(groups), None)
    assert [digests["logprobs"] for digests in _array_digests(arrays)] == [proof.logprobs for proof in proofs]
    for mine, their in zip(read, groups, strict=True):
        assert mine.rewards_differ == their.rewards_differ and mine.errors[:4] == their.errors[:4]


def test_records_of_an_older_format_are_refused_in_one_sentence(tmp_path: Path) -> None:
    run = record(tmp_path, random_groups(0))
    arrays = run.tokens(STEP)
    np.savez(run.tokens_path(STEP), **{name: array for name, array in arrays.items() if name != "format"})
    with pytest.raises(RunError, match="step 7: its tokens are recorded in format 1, and a replay reads formats 2 to"):
        read_step(run, STEP)


def test_half_of_a_step_is_refused(tmp_path: Path) -> None:
    run = record(tmp_path, random_groups(0))
    arrays, lines = run.tokens(STEP), run.trajectories_path(STEP).read_bytes()
    run.trajectories_path(STEP).write_bytes(b"".join(lines.splitlines(keepends=True)[:-1]))
    with pytest.raises(RunError, match="do not belong together: they list other trajectories"):
        read_step(run, STEP)
    run.trajectories_path(STEP).write_bytes(lines)
    np.savez(run.tokens_path(STEP), **(arrays | {"response_ids": arrays["response_ids"][:-1]}))
    with pytest.raises(RunError, match="do not belong together"):
        read_step(run, STEP)
    run.tokens_path(STEP).unlink()
    with pytest.raises(RunError, match=r"step 7 has no records of its tokens \(trainer\.record_tokens\)"):
        read_step(run, STEP)
