"""Reports and records of a replica: each is a beginning of the answers, whatever report gets lost or process dies."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import PauseMode, WeightSyncConfig
from rollout.agents.loop import resume_from
from rollout.engines.base import EngineDiedError
from rollout.progress import Attempt, PartialCompletion, Progress, ProgressReport, prompt_checksum
from rollout.replica.replica import RolloutReplica
from rollout.replica.sampled_log import SampledLog
from rollout.request_ids import RequestId
from rollout.sampled_tokens import MAGIC, SampledFile, SampledPiece, encoded, new_record
from rollout.types import Completion, GenerationRequest, IntArray, KeptTokens
from tests.support.fakes import ClockedEngine, make_completion, make_request, now, run_virtual, settle, update
from tests.support.replicas import on_replica

FIRST, SECOND = RequestId(ordinal=3), RequestId(ordinal=3, episode=1)
RETRIED = RequestId(ordinal=3, attempt=1)


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=4)
MOMENTS = st.lists(st.tuples(st.floats(0, 12), st.booleans()), max_size=8).map(sorted)
"""The seconds at which a replica is asked for its progress, and whether the report arrives."""
UPDATES = st.lists(st.floats(0.1, 9), max_size=3).map(sorted)
MODES = st.sampled_from([PauseMode.keep, PauseMode.abort])


async def ask(
    replica: RolloutReplica,
    progress: Progress,
    moments: list[tuple[float, bool]],
    look: Callable[[ProgressReport], None],
) -> None:
    """Ask for the progress of a replica at each of the moments, and `look` at each report when it has been taken."""
    for moment, arrives in moments:
        await asyncio.sleep(max(0.0, moment - now()))
        report = await replica.progress(progress.known("r"))
        if arrives:
            progress.take("r", report)
        look(report)


async def keep_updating(replica: RolloutReplica, updates: list[float]) -> None:
    for version, moment in enumerate(updates, start=1):
        await asyncio.sleep(max(0.0, moment - now()))
        await update(replica, version)


@on_replica()
async def test_the_end_of_a_request_is_told_twice_and_then_forgotten(replica: RolloutReplica) -> None:
    await replica.generate_group([make_request("3-0", 1)])
    assert (await replica.progress({})).deltas == (), "nobody had asked"
    group = asyncio.create_task(replica.generate_group([make_request("3-0", 1), make_request("3-1", 4)]))
    await asyncio.sleep(2.5)
    for _ in range(2):
        report = await replica.progress({SECOND: 2})
        assert [(p.request_id, p.start, p.tokens.finish_reason) for p in report.deltas] == [(FIRST, 0, "stop")]
        assert (report.running, report.tokens, report.paused) == (1, 4, False)
    assert (await replica.progress({SECOND: 2})).deltas == ()
    await replica.pause(PauseMode.keep)
    assert (await replica.progress({SECOND: 2})).paused
    await replica.resume()
    await group


@on_replica(max_num_seqs=1)
async def test_a_request_that_waits_is_told_of_once(replica: RolloutReplica) -> None:
    group = asyncio.create_task(replica.generate_group([make_request("3-0", 9), make_request("3-1", 9)]))
    for seconds, told in ((0.5, {"3-0": 0, "3-1": 0}), (1.0, {"3-0": 1}), (1.0, {"3-0": 2})):
        await asyncio.sleep(seconds)
        deltas = (await replica.progress({})).deltas
        assert {str(partial.request_id): len(partial.tokens.token_ids) for partial in deltas} == told
    assert await replica.abort(["3-1"]) == ["3-1"], "it can be ended although it has no token"
    await replica.abort()
    await group


@on_replica()
async def test_a_request_that_went_on_here_tells_only_what_is_new(replica: RolloutReplica) -> None:
    """Unless it is asked by somebody who knows less than it started with."""
    had = make_completion([7, 8], [0, 0], "")
    request = replace(make_request("3.1-0", 5), partial=had)
    group = asyncio.create_task(replica.generate_group([request]))
    await asyncio.sleep(1.5)
    (piece,) = (await replica.progress({RETRIED: 2})).deltas
    assert (piece.start, piece.tokens.token_ids.tolist()) == (2, [0])
    (piece,) = (await replica.progress({RETRIED: 1})).deltas
    assert (piece.start, piece.tokens.token_ids.tolist()) == (1, [8, 0])
    (completion,) = await group
    assert completion.token_ids.tolist() == [7, 8, 0, 0, 0]
    assert (await replica.stats())["tokens"] == 3, "sampled here"


@pytest.mark.parametrize("had_by_other", [[], [8, 9]])
@on_replica(max_num_seqs=1)
async def test_of_two_requests_with_one_prompt_neither_is_known_by_tokens_that_the_other_goes_on_from(
    replica: RolloutReplica, had_by_other: list[int]
) -> None:
    """Turn 0 had sampled nothing for this prompt, comes first and takes what turn 1 had. That one goes on from what is
    left, and waits for a seat. A report gets lost."""
    checksum = prompt_checksum((1, 2))
    had = {1: make_completion([5, 6, 7], [0] * 3, ""), 2: make_completion(had_by_other, [0] * len(had_by_other), "")}
    partials = {
        (0, turn): PartialCompletion(prompt_checksum=checksum, completion=completion)
        for turn, completion in had.items()
    }
    progress = Progress()
    progress.begin(3, Attempt(number=1, partials=partials), "r")
    resumed = resume_from(partials, replica.generate_group)
    asking = [asyncio.ensure_future(resumed([make_request(f"3.1-0{turn}", 8)])) for turn in ("", "-1")]
    for seconds, arrives, first, second in ((1.5, False, 0, 0), (1, True, 2, 0), (4, True, 5, 1), (1, True, 5, 2)):
        await asyncio.sleep(seconds)
        report = await replica.progress(progress.known("r"))
        if arrives:
            progress.take("r", report)
            known = {turn: partial.completion.token_ids.tolist() for (_, turn), partial in progress.partials(3).items()}
            assert known[0] == [5, 6, 7] + first * [0]
            assert known.get(1, []) == had_by_other + second * [0]
    answers = [(await each)[0].token_ids.tolist() for each in asking]
    assert answers == [[5, 6, 7] + 5 * [0], had_by_other + (8 - len(had_by_other)) * [0]]
    await ask(replica, progress, [(now(), True)], lambda report: None)
    assert [progress.partials(3)[0, turn].completion.token_ids.tolist() for turn in (0, 1)] == answers


@on_replica()
async def test_a_request_that_was_complete_when_it_was_lost_costs_no_engine_request(replica: RolloutReplica) -> None:
    had = make_completion([7, 8], [0, 0], "")
    (completion,) = await replica.generate_group([replace(make_request("3.1-0", 2), partial=had)])
    assert completion.token_ids.tolist() == [7, 8] and completion.finish_reason == "length"
    stats = await replica.stats()
    assert stats["engine_requests"] - stats["trajectories"] - stats["continued"] == 0, "nothing was sent twice"


@on_replica()
async def test_what_a_dying_engine_had_sampled_can_still_be_told(
    replica: RolloutReplica, engine: ClockedEngine
) -> None:
    await replica.progress({})
    had = replace(make_request("3.1-0", 9), partial=make_completion([7], [0], ""))
    group = asyncio.create_task(replica.generate_group([had, make_request("3.1-1", 9)]))
    await asyncio.sleep(2.5)
    engine.kill()
    with pytest.raises(EngineDiedError):
        await group
    for _ in range(3):  # as often as asked: an answer may come too late
        report = await replica.progress({RETRIED: 2})
    told = {str(p.request_id): (p.start, p.tokens.token_ids.tolist(), p.tokens.finish_reason) for p in report.deltas}
    assert told == {"3.1-0": (2, [0], ""), "3.1-1": (0, [0, 0], "")}


@on_replica()
async def test_what_an_environment_said_is_told_with_the_first_tokens_whatever_report_gets_lost(
    replica: RolloutReplica,
) -> None:
    progress = Progress()
    progress.begin(3, Attempt(), "r")
    single = make_request("3-1", 5)
    group = asyncio.create_task(replica.generate_group([replace(make_request("3-0", 5), num_observed=1), single]))
    observed = []
    for arrives in (False, False, True, True):
        await asyncio.sleep(1.1)
        report = await replica.progress(progress.known("r"))
        observed.append([delta.observed is not None for delta in report.deltas])
        if arrives:
            progress.take("r", report)
    assert observed == [[True, False]] * 3 + [[False, False]]
    with_observation, without = progress.partials(3)[0, 0], progress.partials(3)[1, 0]
    assert with_observation.observed is not None and with_observation.observed.tolist() == [2]
    assert (with_observation.completion.num_tokens, without.observed) == (4, None)
    await group


# -- the record of what is sampled -------------------------------------------------------------------------------------


ORDINAL = 3


def recorded(path: Path) -> list[SampledPiece]:
    file = SampledFile(path)
    pieces = [file.piece(placed.place) for placed in file.pieces()]
    assert file.problem is None
    return pieces


def answers(pieces: list[SampledPiece]) -> dict[int, list[tuple[int, int, float, int]]]:
    """Return (place, id, logprob, version) of each token of each episode, by place."""
    rows_of_episode: dict[int, list[tuple[int, int, float, int]]] = {}
    for piece in pieces:
        places = range(piece.start, piece.start + len(piece.token_ids))
        rows = zip(places, piece.token_ids.tolist(), piece.logprobs.tolist(), piece.versions().tolist(), strict=True)
        rows_of_episode.setdefault(piece.request_id.episode, []).extend(rows)
    return {episode: sorted(rows) for episode, rows in rows_of_episode.items()}


def rows_of(completion: Completion, start: int = 0) -> list[tuple[int, int, float, int]]:
    versions = np.concatenate([[span.global_steps] * (span.end - span.start) for span in completion.spans])
    rows = enumerate(zip(completion.token_ids.tolist(), completion.logprobs.tolist(), versions.tolist(), strict=True))
    return [(place, *row) for place, row in rows][start:]


def replica_in(folder: Path, name: str = "r", **config: Any) -> tuple[RolloutReplica, ClockedEngine, Path]:
    engine, path = ClockedEngine(2), new_record(folder, name)
    deadlines: dict[str, Any] = {"stage_timeout_s": 100.0, "pause_timeout_s": 10.0, "swap_timeout_s": 50.0}
    return RolloutReplica(name, engine, WeightSyncConfig(**deadlines | config), SampledLog(path)), engine, path


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, moments=MOMENTS, updates=UPDATES, mode=MODES, top_k=st.sampled_from([-1, 2]))
def test_what_is_told_is_a_beginning_of_the_answer_and_every_token_is_written_once(
    lengths: list[int], moments: list[tuple[float, bool]], updates: list[float], mode: PauseMode, top_k: int
) -> None:
    """Through updates that freeze or abort, on an engine with fewer seats than requests, with reports that get lost. A
    token is in the file before anyone else gets it."""
    with TemporaryDirectory() as folder:
        run_virtual(check_updates(Path(folder), lengths, moments, updates, mode, top_k))


async def check_updates(
    folder: Path, lengths: list[int], moments: list[tuple[float, bool]], updates: list[float], mode: PauseMode, k: int
) -> None:
    replica, _, path = replica_in(folder, pause_mode=mode)
    await update(replica, 0)
    progress = Progress()
    progress.begin(ORDINAL, Attempt(), "r")

    def look(report: ProgressReport) -> None:
        assert report.tokens >= sum(progress.known("r").values())
        known = {key[0]: partial.completion for key, partial in progress.partials(ORDINAL).items()}
        assert_begin(known, answers(recorded(path)))

    asking = asyncio.gather(ask(replica, progress, moments, look), keep_updating(replica, updates))
    requests = [truncated(make_request(f"{ORDINAL}-{index}", length), k) for index, length in enumerate(lengths)]
    completions = await replica.generate_group(requests)
    pieces = recorded(path)
    for whole in [*completions, *(partial.completion for partial in progress.partials(ORDINAL).values())]:
        assert_drawn_from_itself(whole, k)
    for piece in pieces:
        expected = None if k == -1 else drawn_from_itself(piece.token_ids).checksums().tolist()
        assert (None if piece.kept is None else piece.kept.tolist()) == expected
    assert answers(pieces) == {index: rows_of(completion) for index, completion in enumerate(completions)}
    assert {piece.prompt_checksum for piece in pieces} == {prompt_checksum(requests[0].prompt_ids)}
    await asking
    assert answers(recorded(path)) == answers(pieces)
    assert (await replica.progress({})).tokens == sum(lengths)
    for (index, _), told in progress.partials(ORDINAL).items():
        known, whole = told.completion, completions[index]
        assert told.prompt_checksum == prompt_checksum(requests[0].prompt_ids)
        assert known.token_ids.tolist() == whole.token_ids[: known.num_tokens].tolist()
        assert Completion.concatenate([known, whole.after(known.num_tokens)]).spans == whole.spans
        if known.finish_reason:
            assert (known.num_tokens, known.finish_reason) == (whole.num_tokens, "stop")


def truncated(request: GenerationRequest, top_k: int) -> GenerationRequest:
    return replace(request, sampling=replace(request.sampling, top_k=top_k))


def drawn_from_itself(token_ids: IntArray) -> KeptTokens:
    """Return what a simulated engine says of tokens."""
    return KeptTokens(counts=np.ones(len(token_ids), np.int32), token_ids=token_ids)


def assert_drawn_from_itself(completion: Completion, top_k: int) -> None:
    if completion.num_tokens == 0 or top_k == -1:
        assert completion.kept is None or not len(completion.kept.counts)
    else:
        assert completion.kept is not None
        assert completion.kept.counts.tolist() == [1] * completion.num_tokens
        assert completion.kept.token_ids.tolist() == completion.token_ids.tolist()


def assert_begin(known: Mapping[int, Completion], written: Mapping[int, list[tuple[int, int, float, int]]]) -> None:
    for episode, completion in known.items():
        rows = rows_of(completion) if completion.num_tokens else []
        assert written.get(episode, [])[: len(rows)] == rows


async def test_what_a_dead_engine_had_sampled_and_what_another_went_on_with_is_recorded(tmp_path: Path) -> None:
    dying, engine, first = replica_in(tmp_path, "r")
    other, _, second = replica_in(tmp_path, "s")
    await update(dying, 0)
    await update(other, 1)
    request = truncated(make_request("3-0", 5), 2)
    group = asyncio.create_task(dying.generate_group([request]))
    await asyncio.sleep(2.5)
    engine.kill()
    with pytest.raises(EngineDiedError):
        await group
    (delta,) = (await dying.progress({})).deltas
    moved = replace(request, partial=delta.tokens, request_id=replace(request.request_id, attempt=1))
    (completion,) = await other.generate_group([moved])
    (lost,), (rest,) = recorded(first), recorded(second)
    assert [len(lost.token_ids), rest.start, len(rest.token_ids)] == [2, 2, 3]
    assert answers([lost, rest]) == {0: rows_of(completion)}
    assert completion.token_ids.tolist() == [0, 0, 1, 1, 1]
    assert_drawn_from_itself(completion, 2)
    assert rest.prompt_checksum == lost.prompt_checksum and rest.request_id.attempt == 1


async def test_an_evaluation_leaves_no_record(tmp_path: Path) -> None:
    replica, _, path = replica_in(tmp_path)
    await update(replica, 0)
    group = asyncio.create_task(replica.generate_group([make_request("eval-3-0", 3)]))
    await asyncio.sleep(1.5)
    await replica.progress({})
    await group
    await settle()
    assert path.read_bytes() == MAGIC


def test_a_full_disk_costs_the_record_and_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    log = SampledLog(Path("/dev/full"))
    log.begin(make_request("3-0", 2))
    log.end(RequestId(ordinal=3), make_completion([1, 2], [0, 0], "stop"))
    (said,) = caplog.messages
    assert said.startswith("/dev/full cannot be written")


# -- the file ----------------------------------------------------------------------------------------------------------


KEPT = KeptTokens(counts=np.array([2, 0, 1], np.int32), token_ids=np.array([1, 9, 6], np.int32))


def file_of(path: Path, num_pieces: int = 3) -> tuple[bytes, list[int]]:
    """Its bytes, and where each piece ends."""
    data, ends = MAGIC, [len(MAGIC)]
    for number in range(num_pieces):
        tokens = make_completion([number, 5, 6], [number, number, number + 1], "")
        if number == 1:
            tokens = replace(tokens, kept=KEPT)
        data += encoded(RequestId(ordinal=number, attempt=1, episode=2, turn=3, part=4), 99, number, tokens)
        ends.append(len(data))
    path.write_bytes(data)
    return data, ends


def read(path: Path) -> tuple[int, str | None]:
    """The number of whole pieces, which are those that were written, and what is wrong with the file."""
    file = SampledFile(path)
    pieces = [file.piece(placed.place) for placed in file.pieces()]
    for number, piece in enumerate(pieces):
        assert piece.request_id == RequestId(ordinal=number, attempt=1, episode=2, turn=3, part=4)
        assert (piece.prompt_checksum, piece.start, piece.token_ids.tolist()) == (99, number, [number, 5, 6])
        assert piece.versions().tolist() == [number, number, number + 1]
        assert (None if piece.kept is None else piece.kept.tolist()) == (
            KEPT.checksums().tolist() if number == 1 else None
        )
        assert piece.logprobs.tolist() == pytest.approx([-number / 10, -0.5, -0.6])
    return len(pieces), file.problem


def test_of_a_file_that_is_cut_all_whole_pieces_are_read(tmp_path: Path) -> None:
    data, ends = file_of(path := tmp_path / "r.bin")
    for length in range(1, len(data) + 1):
        path.write_bytes(data[:length])
        assert read(path) == (max(0, sum(end <= length for end in ends) - 1), None)


def test_a_changed_byte_is_found_and_nothing_after_it_is_believed(tmp_path: Path) -> None:
    data, ends = file_of(path := tmp_path / "r.bin")
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        num_pieces, problem = read(path)
        assert num_pieces == max(0, sum(end <= place for end in ends) - 1)
        assert problem is not None


def test_a_later_process_of_the_run_writes_a_file_of_its_own(tmp_path: Path) -> None:
    first = new_record(tmp_path, "replica-0")
    assert SampledFile(first).is_elsewhere, "until its replica, where it runs, opens it"
    SampledLog(first)
    assert not SampledFile(first).is_elsewhere
    assert new_record(tmp_path, "replica-0") != first
