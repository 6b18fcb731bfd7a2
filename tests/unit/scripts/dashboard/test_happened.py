"""scripts/dashboard/happened.py, lanes.py and anatomy.py: a window of events shows what all of them show."""

from pathlib import Path

import pytest

from rollout.events.kinds import GroupReady
from scripts.dashboard import happened
from scripts.dashboard.anatomy import anatomy
from scripts.dashboard.happened import Happenings, Window
from scripts.dashboard.lanes import timeline
from scripts.dashboard.runs import DashboardError
from tests.support.dashboards import JOB, simulated_run
from tests.support.happenings import at, make_writer, turn
from trainer.tracking.events.kinds import BatchAssembled, StepPart, StepPartEnded, StepPartStarted
from trainer.tracking.events.reader import EventReader
from trainer.tracking.events.view import RunView


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_run(tmp_path_factory.mktemp("runs") / "a")


@pytest.fixture
def seen(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Happenings:
    """With marks every 4 kB, so that there are many, and processes that are a second late."""
    monkeypatch.setattr(happened, "MARK_BYTES", 4096)
    monkeypatch.setattr(happened, "LATE_S", 1.5)
    happenings = Happenings(run_dir)
    while happenings.look() < 1:
        pass
    return happenings


def whole(run_dir: Path) -> RunView:
    view = RunView()
    for stamped in EventReader(run_dir):
        view.add(stamped)
    return view


def test_the_pass_holds_what_is_rare_and_nothing_else(seen: Happenings, run_dir: Path) -> None:
    every = whole(run_dir)
    assert seen.view.steps == every.steps and len(seen.view.steps) == JOB.num_steps
    assert seen.view.updates == every.updates and seen.view.fleet == every.fleet
    assert not seen.view.groups and len(every.groups) > 20
    assert len(seen._scan.marks) > 5


def test_a_window_has_the_groups_of_its_steps_whole(seen: Happenings, run_dir: Path) -> None:
    every, view = whole(run_dir), seen.of_steps(1, 2).view
    ordinals = [*every.steps[1].ordinals, *every.steps[2].ordinals]
    assert len(ordinals) == 2 * JOB.prompts_per_step
    assert all(view.groups[ordinal].trajectories == every.groups[ordinal].trajectories for ordinal in ordinals)
    assert len(view.groups) < len(every.groups)


def test_steps_that_are_not_there_are_refused_by_name(seen: Happenings, tmp_path: Path) -> None:
    with pytest.raises(DashboardError, match=r"steps=7:99: not in the events; 1 to 8 are there"):
        seen.of_steps(7, 99)
    with pytest.raises(DashboardError, match="there is none"):
        Happenings(tmp_path).of_steps(1, 1)


def test_a_live_run_grows_and_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    def step(number: int) -> list[object]:
        of = {"global_steps": number, "part": StepPart.train}
        return [at(number, StepPartStarted(**of)), at(number + 0.5, StepPartEnded(**of))]

    happenings = Happenings(tmp_path)
    assert happenings.look() == 1 and not happenings.is_there
    with make_writer(tmp_path) as writer:
        writer.put(step(1))
    happenings.look()
    with make_writer(tmp_path) as writer:
        writer.put(step(2))
    happenings.look()
    assert sorted(happenings.view.steps) == [1, 2]
    path = tmp_path / "events.jsonl"
    thinned = path.read_bytes().splitlines(keepends=True)[2:]
    (tmp_path / "aside").write_bytes(b"".join(thinned))
    (tmp_path / "aside").replace(path)
    happenings.look()
    assert sorted(happenings.view.steps) == [2]


def test_lanes_do_not_overlap_and_turns_are_cut_by_version(seen: Happenings) -> None:
    picture = timeline(seen.of_steps(6, 8))
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
    seen: Happenings, run_dir: Path
) -> None:
    window, every = seen.of_steps(3, 4), whole(run_dir)
    picture = timeline(window)
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


def test_the_anatomy_marks_the_trajectory_that_ended_last(seen: Happenings, run_dir: Path) -> None:
    window, every = seen.of_steps(1, 1), whole(run_dir)
    picture = anatomy(window, 1)
    last = max((every.groups[ordinal] for ordinal in every.steps[1].ordinals), key=lambda group: group.ready or 0)
    ends = {episode: one.episode_span.end for episode, one in last.trajectories.items() if one.episode_span}
    assert picture["critical"] == [last.ordinal, max(ends, key=lambda episode: ends[episode] or 0)]
    assert f"The last group to be ready was of prompt {last.ordinal}" in picture["why"]
    assert picture["groups"][0]["ordinal"] == last.ordinal and picture["total"] == 3


def test_a_step_takes_as_long_as_all_its_parts_and_marks_no_trajectory_it_did_not_wait_for() -> None:
    """It updates twice: it waits for the update before, and publishes."""
    ready = GroupReady(ordinal=3, min_version=0, num_tokens=9, reward=1.0)
    parts = [("wait", 5.0, 5.0), ("train", 5.0, 6.0), ("update", 6.0, 8.0), ("update", 8.0, 9.5)]
    view = RunView()
    for stamped in [*turn(3, 1.0, 2.0, [(0, 0)], "replica-0"), at(2.5, ready)]:
        view.add(stamped)
    view.add(at(5.0, BatchAssembled(global_steps=1, ordinals=(3,), num_tokens=9)))
    for name, start, end in parts:
        view.add(at(start, StepPartStarted(global_steps=1, part=StepPart(name))))
        view.add(at(end, StepPartEnded(global_steps=1, part=StepPart(name))))
    picture = anatomy(Window(view, 5.0, 10.0, is_cut=False), 1)
    assert picture["critical"] is None
    longest = "Step 1 took 4.50 s, 3.50 s of it waiting for a weight update or publishing."
    assert picture["why"] == f"{longest} Its groups were ready before it began."
