"""A replica's own record of what it samples holds every token once, whatever happens to replica and file."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import PauseMode, WeightSyncConfig
from rollout.engines.base import EngineDiedError
from rollout.progress import Attempt, Progress, prompt_checksum
from rollout.replica.replica import RolloutReplica
from rollout.replica.sampled_log import SampledLog
from rollout.request_ids import RequestId
from rollout.sampled import MAGIC, SampledFile, SampledPiece, encoded, new_record
from rollout.types import Completion
from tests.support.fakes import ClockedEngine, make_completion, make_request, now, run_virtual, settle, update

ORDINAL = 3


def recorded(path: Path) -> list[SampledPiece]:
    file = SampledFile(path)
    pieces = [file.piece(placed.place) for placed in file.pieces()]
    assert file.problem is None
    return pieces


def answers(pieces: list[SampledPiece]) -> dict[int, list[tuple[int, int, float, int]]]:
    """Of each episode (place, id, logprob, version), by place."""
    found: dict[int, list[tuple[int, int, float, int]]] = {}
    for piece in pieces:
        places = range(piece.start, piece.start + len(piece.token_ids))
        rows = zip(places, piece.token_ids.tolist(), piece.logprobs.tolist(), piece.versions().tolist(), strict=True)
        found.setdefault(piece.request_id.episode, []).extend(rows)
    return {episode: sorted(rows) for episode, rows in found.items()}


def rows_of(completion: Completion, start: int = 0) -> list[tuple[int, int, float, int]]:
    versions = np.concatenate([[span.global_steps] * (span.end - span.start) for span in completion.spans])
    rows = enumerate(zip(completion.token_ids.tolist(), completion.logprobs.tolist(), versions.tolist(), strict=True))
    return [(place, *row) for place, row in rows][start:]


def replica_in(folder: Path, name: str = "r", **config: Any) -> tuple[RolloutReplica, ClockedEngine, Path]:
    engine, path = ClockedEngine(2), new_record(folder, name)
    deadlines: dict[str, Any] = {"stage_timeout_s": 100.0, "pause_timeout_s": 10.0, "swap_timeout_s": 50.0}
    return RolloutReplica(name, engine, WeightSyncConfig(**deadlines | config), SampledLog(path)), engine, path


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    moments=st.lists(st.tuples(st.floats(0, 12), st.booleans()), max_size=8).map(sorted),
    updates=st.lists(st.floats(0.1, 9), max_size=3).map(sorted),
    mode=st.sampled_from([PauseMode.keep, PauseMode.abort]),
)
def test_every_token_of_every_answer_is_written_once(
    lengths: list[int], moments: list[tuple[float, bool]], updates: list[float], mode: PauseMode
) -> None:
    """Through updates that freeze or abort, on an engine with fewer seats than requests, with reports that get lost. A
    token is in the file before anyone else gets it."""
    with TemporaryDirectory() as folder:
        run_virtual(check_updates(Path(folder), lengths, moments, updates, mode))


async def check_updates(
    folder: Path, lengths: list[int], moments: list[tuple[float, bool]], updates: list[float], mode: PauseMode
) -> None:
    replica, _, path = replica_in(folder, pause_mode=mode)
    await update(replica, 0)
    progress = Progress()
    progress.begin(ORDINAL, Attempt(), "r")

    async def ask() -> None:
        for moment, arrives in moments:
            await asyncio.sleep(max(0.0, moment - now()))
            report = await replica.progress(progress.known("r"))
            if arrives:
                progress.take("r", report)
            known = {key[0]: partial.completion for key, partial in progress.partials(ORDINAL).items()}
            assert_begin(known, answers(recorded(path)))

    async def keep_updating() -> None:
        for version, moment in enumerate(updates, start=1):
            await asyncio.sleep(max(0.0, moment - now()))
            await update(replica, version)

    asking = asyncio.gather(ask(), keep_updating())
    requests = [make_request(f"{ORDINAL}-{index}", length) for index, length in enumerate(lengths)]
    completions = await replica.generate_group(requests)
    pieces = recorded(path)
    assert answers(pieces) == {index: rows_of(completion) for index, completion in enumerate(completions)}
    assert {piece.prompt_checksum for piece in pieces} == {prompt_checksum(requests[0].prompt_ids)}
    await asking
    assert answers(recorded(path)) == answers(pieces)


def assert_begin(known: Mapping[int, Completion], written: Mapping[int, list[tuple[int, int, float, int]]]) -> None:
    for episode, completion in known.items():
        rows = rows_of(completion) if completion.num_tokens else []
        assert written.get(episode, [])[: len(rows)] == rows


def test_what_a_dead_engine_had_sampled_and_what_another_went_on_with_is_recorded(tmp_path: Path) -> None:
    async def test() -> None:
        dying, engine, first = replica_in(tmp_path, "r")
        other, _, second = replica_in(tmp_path, "s")
        await update(dying, 0)
        await update(other, 1)
        request = make_request("3-0", 5)
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
        assert rest.prompt_checksum == lost.prompt_checksum and rest.request_id.attempt == 1

    run_virtual(test())


def test_an_evaluation_leaves_no_record(tmp_path: Path) -> None:
    async def test() -> None:
        replica, _, path = replica_in(tmp_path)
        await update(replica, 0)
        group = asyncio.create_task(replica.generate_group([make_request("eval-3-0", 3)]))
        await asyncio.sleep(1.5)
        await replica.progress({})
        await group
        await settle()
        assert path.read_bytes() == MAGIC

    run_virtual(test())


def test_a_full_disk_costs_the_record_and_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    log = SampledLog(Path("/dev/full"))
    log.begin(make_request("3-0", 2))
    log.end(RequestId(ordinal=3), make_completion([1, 2], [0, 0], "stop"))
    (said,) = caplog.messages
    assert said.startswith("/dev/full cannot be written")


# -- the file ----------------------------------------------------------------------------------------------------------


def file_of(path: Path, num_pieces: int = 3) -> tuple[bytes, list[int]]:
    """Its bytes, and where each piece ends."""
    data, ends = MAGIC, [len(MAGIC)]
    for number in range(num_pieces):
        tokens = make_completion([number, 5, 6], [number, number, number + 1], "")
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
        found, problem = read(path)
        assert found == max(0, sum(end <= place for end in ends) - 1)
        assert problem is not None


def test_a_later_process_of_the_run_writes_a_file_of_its_own(tmp_path: Path) -> None:
    first = new_record(tmp_path, "replica-0")
    assert SampledFile(first).is_elsewhere, "until its replica, where it runs, opens it"
    SampledLog(first)
    assert not SampledFile(first).is_elsewhere
    assert new_record(tmp_path, "replica-0") != first
