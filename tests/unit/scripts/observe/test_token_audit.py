"""The trained tokens of a run against what its replicas recorded: what is told, and what cannot be."""

import io
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.progress import prompt_checksum
from rollout.replica.sampled_log import SampledLog
from rollout.request_ids import RequestId
from rollout.sampled_tokens import SAMPLED, SampledFile, new_record
from rollout.types import GenerationRequest, SamplingParams, TokenSequence, Trajectory, TrajectoryGroup
from scripts.observe.token_audit import TokenAudit, TokenCounts
from tests.support.fakes import make_completion, make_prompt, make_trajectory
from trainer.tracking.trajectories import token_arrays

GROUP_SIZE, VERSION = 2, 4
AS_IT_SHOULD_BE: dict[str, Any] = {"never_sampled": 0, "misplaced": 0, "again": 0, "unchecked": 0}


def write(run_dir: Path, ordinal: int, index: int, replica: str = "replica-0", attempt: int = 0) -> None:
    """Record two turns of an episode: [10 11], and after the observation [99] [12 13 14]."""
    log = SampledLog(new_record(run_dir, replica))
    for turn, (before, ids) in enumerate([((1, 2), [10, 11]), ((1, 2, 10, 11, 99), [12, 13, 14])]):
        name = RequestId(ordinal=ordinal, attempt=attempt, episode=index, turn=turn)
        log.begin(GenerationRequest(request_id=name, prompt_ids=before, sampling=SamplingParams()))
        log.end(name, make_completion(ids, [VERSION] * len(ids), "stop"))


def trained_sequence() -> TokenSequence:
    ids = [10, 11, 99, 12, 13, 14]
    whole = make_completion(ids, [VERSION] * 6, "stop")
    is_sampled = np.array([token != 99 for token in ids])
    return replace(
        TokenSequence.of((1, 2), whole, is_sampled),
        rollout_logprobs=np.where(is_sampled, whole.logprobs, np.float32(0)),
        spans=(*make_completion(ids[:2], [VERSION] * 2, "").spans, replace(whole.spans[0], start=3)),
    )


def groups(*ordinals: int) -> list[TrajectoryGroup]:
    trajectory = replace(make_trajectory(), sequences=(trained_sequence(),))
    return [
        TrajectoryGroup(prompt=make_prompt(ordinal), trajectories=(trajectory,) * GROUP_SIZE) for ordinal in ordinals
    ]


def audited(run_dir: Path, some: list[TrajectoryGroup], unrecorded_until: int = 0) -> tuple[TokenCounts, list[str]]:
    tokens = TokenAudit(run_dir, unrecorded_until)
    data = token_arrays(some, [np.zeros(len(group.trajectories), np.float32) for group in some])
    with np.load(io.BytesIO(data)) as arrays:
        tokens.take_step(
            5, arrays, [(group.prompt.ordinal, index) for group in some for index in range(len(group.trajectories))]
        )
    return tokens.counts(), list(tokens.findings())


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """Two prompts, each of whose trajectories ran on another replica."""
    for ordinal in (7, 8):
        for index in range(GROUP_SIZE):
            write(tmp_path, ordinal, index, f"replica-{index}")
    yield tmp_path


def test_what_was_sampled_and_trained_is_counted(run_dir: Path) -> None:
    write(run_dir, 9, 0)  # was not trained
    write(run_dir, 7, 0, attempt=1)  # and what nobody used of an episode that was
    counts, findings = audited(run_dir, groups(7, 8))
    assert findings == []
    expected = AS_IT_SHOULD_BE | {"sampled": 30, "trained": 20, "delivered_fraction": 0.8}
    assert asdict(counts) == expected


def with_sequences(change: Callable[[TokenSequence], tuple[TokenSequence, ...]]) -> list[TrajectoryGroup]:
    """The second trajectory of prompt 8 is another."""
    whole, changed = groups(7, 8)
    first, second = changed.trajectories

    def of(trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, sequences=change(*trajectory.sequences))

    return [whole, replace(changed, trajectories=(first, of(second)))]


def changed(name: str, place: int, by: Any) -> Callable[[TokenSequence], tuple[TokenSequence, ...]]:
    def change(sequence: TokenSequence) -> tuple[TokenSequence, ...]:
        values = {"response_ids": sequence.response_ids, "rollout_logprobs": sequence.rollout_logprobs}[name].copy()
        values[place] = values[place] + by
        return (replace(sequence, **{name: values}),)

    return change


AFTER_OTHERS = "tokens were trained after others than those that they were sampled after, the first:"
WHERE = "step 5, prompt 8, trajectory 1, sequence"
DAMAGE: dict[str, tuple[Callable[[TokenSequence], tuple[TokenSequence, ...]], dict[str, int], list[str]]] = {
    "an id of the first turn, which the second then does not follow": (
        changed("response_ids", 1, 1000),
        {"never_sampled": 1, "misplaced": 3},
        [
            f"1 tokens that no replica sampled were trained, the first: {WHERE} 0, token 1",
            f"3 {AFTER_OTHERS} {WHERE} 0, token 3",
        ],
    ),
    "an observation": (
        changed("response_ids", 2, 1),
        {"misplaced": 3},
        [f"3 {AFTER_OTHERS} {WHERE} 0, token 3"],
    ),
    "a version": (
        lambda sequence: (
            replace(sequence, spans=(replace(sequence.spans[0], global_steps=VERSION - 1), sequence.spans[1])),
        ),
        {"never_sampled": 2},
        [f"2 tokens that no replica sampled were trained, the first: {WHERE} 0, token 0"],
    ),
    "an observation with loss": (
        lambda sequence: (replace(sequence, loss_mask=np.ones(6, np.bool_)),),
        {"never_sampled": 1, "misplaced": 0},
        [f"1 tokens that no replica sampled were trained, the first: {WHERE} 0, token 2"],
    ),
    "a sequence twice": (
        lambda sequence: (sequence, sequence),
        {"again": 5},
        ["5 sampled tokens were trained again in another place of their trajectory, the first: "],
    ),
}


@pytest.mark.parametrize(("change", "counted", "said"), DAMAGE.values(), ids=DAMAGE)
def test_what_was_not_sampled_so_is_found(
    run_dir: Path,
    change: Callable[[TokenSequence], tuple[TokenSequence, ...]],
    counted: dict[str, int],
    said: list[str],
) -> None:
    counts, findings = audited(run_dir, with_sequences(change))
    assert {key: asdict(counts)[key] for key in AS_IT_SHOULD_BE} == AS_IT_SHOULD_BE | counted
    assert len(findings) == len(said) and all(map(str.startswith, findings, said))


def test_tokens_of_another_episode_are_not_those_of_this_one(run_dir: Path) -> None:
    counts, _ = audited(run_dir, groups(7, 8, 9))
    assert (counts.never_sampled, counts.trained) == (10, 30)


def test_without_any_record_everything_is_unchecked(tmp_path: Path) -> None:
    counts, findings = audited(tmp_path, groups(7, 8))
    assert (counts.unchecked, counts.trained, counts.sampled, findings) == (20, 20, 0, [])


def test_the_record_of_a_replica_elsewhere_makes_its_tokens_unchecked_only(run_dir: Path) -> None:
    new_record(run_dir, "replica-2")  # it opened a file of this name on another machine
    counts, findings = audited(run_dir, groups(7, 9))
    assert (counts.unchecked, counts.trained, counts.never_sampled, findings) == (10, 20, 0, [])
    twice, findings = audited(run_dir, with_sequences(lambda sequence: (sequence, sequence)))
    assert (twice.again, twice.unchecked, len(findings)) == (5, 0, 1)


def test_what_a_process_that_recorded_nothing_may_have_sampled_is_unchecked(run_dir: Path) -> None:
    counts, findings = audited(run_dir, groups(7, 9), unrecorded_until=VERSION)
    assert (counts.unchecked, findings) == (10, [])
    counts, findings = audited(run_dir, groups(7, 9), unrecorded_until=VERSION - 1)
    assert (counts.unchecked, counts.never_sampled, len(findings)) == (0, 10, 1)


def test_a_damaged_record_is_a_finding_besides_the_tokens_that_it_held(run_dir: Path) -> None:
    path = run_dir / SAMPLED / "replica-1.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    counts, findings = audited(run_dir, groups(7, 8))
    assert counts.never_sampled == 3
    assert findings[0].startswith(f"{SAMPLED}/replica-1.bin: the piece at byte ") and len(findings) == 2
    assert prompt_checksum((1, 2)) == SampledFile(path).piece(8).prompt_checksum
