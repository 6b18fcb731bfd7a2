"""The trace of a run, read by Perfetto itself: its page in a real browser, with its own trace processor."""

from pathlib import Path

import pytest

from scripts.observe.run import Run
from scripts.timeline import TRACE_FILE, write_trace
from tests.support.browser import find_browser, opened_browser
from tests.support.event_runs import JOB, simulated
from tests.support.happenings import write
from tests.support.perfetto import opened_trace

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="needs a Chromium in PATH (Debian: apt-get install chromium)"
)
OWNED = """
with owned as (
  select slice.id as id, slice.name as slice, process.name as process
  from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
)
"""
CUTS = OWNED + "select process, count(*) from owned where slice glob 'v[0-9]*' group by process"
ARROWS = (
    OWNED
    + """
select a.process, b.process, count(*) from flow join owned a on slice_out = a.id join owned b on slice_in = b.id
group by a.process, b.process order by a.process
"""
)
"""The arrows, counted by the processes that they go from and to."""


@pytest.mark.slow
def test_perfetto_reads_all_of_a_trace_and_complains_of_nothing(tmp_path: Path) -> None:
    events, _, _ = simulated()
    write(tmp_path, events)
    write_trace(Run.open(tmp_path), tmp_path / TRACE_FILE)
    with opened_browser(tmp_path / "profile") as tab, opened_trace(tab, tmp_path / TRACE_FILE) as perfetto:
        assert perfetto.complaints() == []
        names = {name for (name,) in perfetto.rows("select name from process where name is not null")}
        assert names == {"driver", "replica-0", "replica-1", "agent-worker-0"}
        cuts = {process: count for process, count in perfetto.rows(CUTS)}
        assert set(cuts) == {"replica-0", "replica-1"} and sum(cuts.values()) > JOB.num_trajectories
        arrows = perfetto.rows(ARROWS)
        assert [pair for *pair, _ in arrows] == [["replica-0", "driver"], ["replica-1", "driver"]]
        assert sum(count for *_, count in arrows) == JOB.num_trajectories
        counters = {name for (name,) in perfetto.rows("select distinct name from counter_track")}
        assert {"groups in flight", "staleness max", "requests running"} <= counters, counters
