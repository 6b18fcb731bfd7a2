"""Windows of events, and the pictures of the page, show what all of the events show."""

from pathlib import Path

import pytest

from rollout.events.event import Stamped
from rollout.events.kinds import GroupReady
from scripts.dashboard import anatomy, timeline
from scripts.observe import events
from scripts.observe.events import EventIndex, EventReader, Position, Window, valid_events
from scripts.observe.files import RunError
from tests.support.dashboards import JOB, simulated_run
from tests.support.event_runs import view_of
from tests.support.happenings import at, claims, make_writer, recorded, turn, write
from trainer.tracking.events.kinds import BatchAssembled, Resumed, StepPart, StepPartEnded, StepPartStarted
from trainer.tracking.events.lines import event_files, to_line


def test_a_reader_follows_and_goes_on_from_a_place(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    assert reader.read() == []
    write(tmp_path, claims(range(3)))
    assert reader.read() == claims(range(3)) and reader.read() == []
    write(tmp_path, claims(range(3, 5)))
    later = EventReader(tmp_path, reader.position)
    assert reader.read() == later.read() == claims(range(3, 5))
    assert list(EventReader(tmp_path)) == claims(range(5))


def test_a_torn_end_is_left_and_then_passed_over(tmp_path: Path) -> None:
    write(tmp_path, claims([0]))
    [(_, path)] = event_files(tmp_path)
    with path.open("ab") as file:
        file.write(to_line(recorded(1))[:-9])  # a process is killed while it writes
    reader = EventReader(tmp_path)
    assert reader.read() == claims([0]) and reader.read() == [] and reader.num_damaged == 0
    write(tmp_path, claims([1]))
    assert reader.read() == claims([1]) and reader.num_damaged == 1


def test_a_kind_of_another_version_is_counted_and_passed_over(tmp_path: Path) -> None:
    write(tmp_path, claims([0]))
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"kind":"tea_served","t":1.5,"who":"driver","sugar":2}\n{"kind":"tea_\n{}\n')
    reader = EventReader(tmp_path)
    assert list(reader) == claims([0])
    assert (reader.num_unknown, reader.num_damaged) == (1, 2)


def test_a_resume_takes_back_later_steps_only(tmp_path: Path) -> None:
    resumed = at(9.0, Resumed(global_steps=1))
    write(tmp_path, [recorded(1), recorded(2), *claims([0]), resumed, recorded(2), recorded(3)])
    assert list(valid_events(tmp_path)) == [recorded(1), *claims([0]), resumed, recorded(2), recorded(3)]


def test_a_place_in_a_file_that_was_thinned_goes_on_with_the_next(tmp_path: Path) -> None:
    write(tmp_path, claims(range(100)))
    reader = EventReader(tmp_path)
    assert len(reader.read(max_bytes=200)) == 2
    thinned = tmp_path / "new"
    thinned.write_bytes(to_line(recorded(1)))
    thinned.replace(tmp_path / "events.jsonl")
    (tmp_path / "events.2.jsonl").write_bytes(b"".join(map(to_line, claims([200]))))
    assert list(reader) == claims([200]) and reader.num_damaged == 0
    assert reader.position == Position(2, len(to_line(claims([200])[0])))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_run(tmp_path_factory.mktemp("runs") / "a")


@pytest.fixture
def seen(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> EventIndex:
    """Return an index with marks every 4 kB, so that there are many, and processes that are a second late."""
    monkeypatch.setattr(events, "MARK_BYTES", 4096)
    monkeypatch.setattr(events, "LATE_S", 1.5)
    index = EventIndex(run_dir)
    while index.read_on() < 1:
        pass
    return index


def test_the_pass_holds_what_is_rare_and_nothing_else(seen: EventIndex, run_dir: Path) -> None:
    every = view_of(EventReader(run_dir))
    assert seen.view.steps == every.steps and len(seen.view.steps) == JOB.num_steps
    assert seen.view.updates == every.updates and seen.view.fleet == every.fleet
    assert not seen.view.groups and len(every.groups) > 20
    assert len(seen._scan.marks) > 5


def test_a_window_has_the_groups_of_its_steps_whole(seen: EventIndex, run_dir: Path) -> None:
    every, view = view_of(EventReader(run_dir)), seen.read_steps(1, 2).view
    ordinals = [*every.steps[1].ordinals, *every.steps[2].ordinals]
    assert len(ordinals) == 2 * JOB.prompts_per_step
    assert all(view.groups[ordinal].trajectories == every.groups[ordinal].trajectories for ordinal in ordinals)
    assert len(view.groups) < len(every.groups)


def test_steps_that_are_not_there_are_refused_by_name(seen: EventIndex, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"steps=7:99: not in the events; 1 to 8 are there"):
        seen.read_steps(7, 99)
    with pytest.raises(RunError, match="there is none"):
        EventIndex(tmp_path).read_steps(1, 1)


def test_a_live_run_grows_and_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    def step(number: int) -> list[Stamped]:
        of = {"global_steps": number, "part": StepPart.train}
        return [at(number, StepPartStarted(**of)), at(number + 0.5, StepPartEnded(**of))]

    index = EventIndex(tmp_path)
    assert index.read_on() == 1 and not index.has_events
    with make_writer(tmp_path) as writer:
        writer.put(step(1))
    index.read_on()
    with make_writer(tmp_path) as writer:
        writer.put(step(2))
    index.read_on()
    assert sorted(index.view.steps) == [1, 2]
    path = tmp_path / "events.jsonl"
    thinned = path.read_bytes().splitlines(keepends=True)[2:]
    (tmp_path / "aside").write_bytes(b"".join(thinned))
    (tmp_path / "aside").replace(path)
    index.read_on()
    assert sorted(index.view.steps) == [2]


def test_lanes_do_not_overlap_and_turns_are_cut_by_version(seen: EventIndex) -> None:
    picture = timeline.picture(seen.read_steps(6, 8))
    turns = [turn for replica in picture["replicas"].values() for turn in replica["turns"]]
    assert len(turns) >= 9
    for replica in picture["replicas"].values():
        lanes: dict[int, float] = {}
        for lane, start, end, *_ in replica["turns"]:
            assert start >= lanes.get(lane, float("-inf")) and lane < replica["lanes"]
            lanes[lane] = end
    spanning = [turn for turn in turns if len(turn[3]) > 1]
    assert spanning and all(cuts == sorted(cuts) for cuts in (turn[3] for turn in spanning))
    assert {step for step, *_ in picture["steps"]} >= {6, 7, 8}
    assert all(start <= end for _, start, end in picture["borders"])
    assert all(
        one["frozen"] <= one["swapped"] <= one["resumed"] for r in picture["replicas"].values() for one in r["updates"]
    )


def test_a_turn_has_versions_from_its_first_token_on_and_those_of_its_replica_while_it_goes_on(
    seen: EventIndex, run_dir: Path
) -> None:
    window, every = seen.read_steps(3, 4), view_of(EventReader(run_dir))
    picture = timeline.picture(window)
    going = 0
    for name, replica in picture["replicas"].items():
        served = max(v for v, one in every.updates[name].items() if one.swapped and one.swapped <= window.until)
        for _, _, end, cuts, ordinal, episode, *_ in replica["turns"]:
            (turn,) = every.groups[ordinal].trajectories[episode].turns
            if end is None:
                assert cuts[-1] == [cuts[-1][0], picture["length"], served]
                going += 1
            elif turn.first_token is not None:
                assert cuts[0][0] == pytest.approx(turn.first_token - window.since, abs=1e-4)
    assert going > 0


def test_the_anatomy_marks_the_trajectory_that_ended_last(seen: EventIndex, run_dir: Path) -> None:
    window, every = seen.read_steps(1, 1), view_of(EventReader(run_dir))
    picture = anatomy.picture(window, 1)
    last = max((every.groups[ordinal] for ordinal in every.steps[1].ordinals), key=lambda group: group.ready or 0)
    ends = {episode: one.episode_span.end for episode, one in last.trajectories.items() if one.episode_span}
    assert picture["critical"] == [last.ordinal, max(ends, key=lambda episode: ends[episode] or 0)]
    assert f"The last group to become ready was that of prompt {last.ordinal}" in picture["why"]
    assert picture["groups"][0]["ordinal"] == last.ordinal and picture["total"] == 3


def test_a_step_takes_as_long_as_all_its_parts_and_marks_no_trajectory_it_did_not_wait_for() -> None:
    """It updates twice: it waits for the update before, and publishes."""
    ready = GroupReady(ordinal=3, min_version=0, num_tokens=9, reward=1.0)
    parts = [("wait", 5.0, 5.0), ("train", 5.0, 6.0), ("update", 6.0, 8.0), ("update", 8.0, 9.5)]
    view = view_of([*turn(3, 1.0, 2.0, [(0, 0)], "replica-0"), at(2.5, ready)])
    view.add(at(5.0, BatchAssembled(global_steps=1, ordinals=(3,), num_tokens=9)))
    for name, start, end in parts:
        view.add(at(start, StepPartStarted(global_steps=1, part=StepPart(name))))
        view.add(at(end, StepPartEnded(global_steps=1, part=StepPart(name))))
    picture = anatomy.picture(Window(view, 5.0, 10.0, is_cut=False), 1)
    assert picture["critical"] is None
    longest = "Step 1 took 4.50 s, 3.50 s of it waiting for a weight update or publishing weights."
    assert picture["why"] == f"{longest} Its groups were ready before it began."
