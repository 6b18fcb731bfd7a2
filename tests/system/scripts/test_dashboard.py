"""The page in a real browser: every screen on a run's folder, live, in light and dark, and as one file."""

import csv
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.browser import Tab, find_browser, opened_browser
from tests.support.dashboards import BRANCHED, CONFIG, HOSTILE, LONG_JOB, live_run, simulated_run
from tests.support.page import SCREENS, first_paint, served, show, wait_for
from tests.support.paths import ROOT
from trainer.tracking.sinks import METRICS_FILE

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="needs a Chromium in PATH (Debian: apt-get install chromium)"
)
WORDS = {
    "pulse": (
        "Reward and held-out accuracy",
        "Staleness of the tokens of step 8",
        "Trained against claimed",
        "tool times",
    ),
    "timeline": ("Timeline, steps 6 to 8", "v5", "v6"),
    "anatomy": ("Batch of step 8", "Step 8 took", "21"),
    "groups": ("Groups of step 8", "1 to 3 of 3", "<script>"),
    "groups?step=8&ordinal=21": ("Prompt 21: 3 trajectories", "open 2"),
    "trajectory?step=8&ordinal=21&index=0": ("Step 8, prompt 21, episode 0", "trained by step 8 on v7", "<img src=x"),
    "fleet": (
        "replica-1 is given up: <script>",
        "The run has ended. Replicas: 1 in service at its end",
        "the run ended with: it broke",
        "v8",
    ),
    "metrics?text=^staleness/": ("staleness/max", "staleness/mean"),
    "evaluations": ("no evaluation has been recorded: the run failed (it broke)",),
    "runs": ("new", "failed", "it broke", "old"),
    "files": ("max_staleness: 2", "began", "driver.log"),
    "compare": ("compared with", "old", "staleness/max", "Config keys that differ", "rollout.max_num_seqs", "64", "16"),
}
"""Screen -> words on it."""
FACTS = (
    "sampled by v",
    "rollout logprob 0.0000 (p 1",
    "trainer logprob -0.2397",
    "ratio 0.7868",
    "clipped",
    "advantage 0.284",
)
"""The facts of the sixth loss token, the first that `made_of` clips and does not reject."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    runs = [simulated_run(folder / "new"), simulated_run(folder / "old", tells=False)]
    (runs[1] / "config.yaml").write_text(CONFIG.replace("max_num_seqs: 64", "max_num_seqs: 16"))
    return runs


@pytest.fixture(scope="module")
def address(runs: list[Path]) -> Iterator[str]:
    with served(runs) as address:
        yield address


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with opened_browser(tmp_path_factory.mktemp("profile")) as tab:
        size = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}  # tips stay where they point
        tab.call("Emulation.setDeviceMetricsOverride", **size)
        yield tab


@pytest.fixture
def tab(browser: Tab) -> Iterator[Tab]:
    """No test leaves an error on the console."""
    browser.errors.clear()
    yield browser
    assert browser.errors == []


def test_a_mixture_has_charts_with_a_line_for_each_source(tab: Tab, runs: list[Path], tmp_path: Path) -> None:
    run = tmp_path / "mixture"
    shutil.copytree(runs[0], run)
    lines = [json.loads(line) for line in (run / METRICS_FILE).read_text().splitlines()]
    for line in lines:
        line |= {"sources/sums/score": 0.5, "sources/finding/score": 0.25, "sources/sums/trained_groups": line["step"]}
        line |= {"sources/sums/curriculum/pass_rate": 0.125}
    (run / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with served([run]) as address:
        pulse = show(tab, address, "pulse")
        assert all(words in pulse for words in ("Reward by source", "Trained groups by source", "sums", "finding"))
        assert "sources/sums/curriculum/pass_rate" in show(tab, address, "metrics?text=curriculum")
        tab.open("about:blank")  # before the server is gone, for which the page would ask


def inked(tab: Tab) -> bool:
    """Return whether every canvas has something on it."""
    return tab.evaluate(
        "[...document.querySelectorAll('canvas')].every((one) => "
        "one.getContext('2d').getImageData(0, 0, one.width, one.height).data.some((value) => value > 0))"
    )


@pytest.mark.parametrize("screen", WORDS)
def test_every_screen_shows_the_run_and_keeps_its_text_as_text(tab: Tab, address: str, screen: str) -> None:
    text = show(tab, address, screen)
    assert [words for words in WORDS[screen] if words not in text] == []
    assert "hacked" not in tab.evaluate("document.title")
    assert tab.evaluate("document.querySelectorAll('#main img, #main script').length") == 0
    assert inked(tab)


def test_a_replay_is_compared_with_its_run_and_says_what_it_is(tab: Tab, address: str, runs: list[Path]) -> None:
    folder = runs[0] / "replays" / "algorithm.loss-gspo"
    folder.mkdir(parents=True)
    rows = [{"step": step, "time": 1.0, "timing_s/step": 1.0, "replay/gradient_cosine": 0.25} for step in range(1, 5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(CONFIG + "algorithm:\n  loss: gspo\n")
    (folder / "summary.json").write_text("{}")
    try:
        text = show(tab, address, "compare?with=new/algorithm.loss-gspo")
    finally:
        shutil.rmtree(folder.parent)
    says = "replay of new: what its rollouts would have taught with these keys, not what another run would have sampled"
    assert [words for words in (says, "algorithm.loss", "gspo", "0.25") if words not in text] == []
    drawn = "[...document.querySelectorAll('canvas')].filter((one) => (one.ariaLabel || '').startsWith('replay/'))"
    assert tab.evaluate(f"{drawn}.length") == 1, "metrics that neither has are not drawn"


def test_a_run_of_an_older_version_opens(tab: Tab, address: str) -> None:
    for screen, words in [("timeline", "has no events.jsonl"), ("anatomy", "no events"), ("fleet", "no events.jsonl")]:
        assert words in show(tab, address, f"{screen}?run=old")


def test_a_session_is_shown_by_messages_and_branches_and_tokens_say_what_the_trainer_made_of_them(
    tab: Tab, address: str
) -> None:
    first = 3 * (BRANCHED - 1)
    text = show(tab, address, f"trajectory?step={BRANCHED}&ordinal={first}&index=0")
    expected = (
        "shared by sequences 1, 2, 3",
        "sequence 1, alone from here on",
        "turn 1 (continued), sampled by v",
        "prompt",
    )
    assert [words for words in expected if words not in text] == []
    assert tab.evaluate("document.querySelectorAll('.branch').length") == 5
    tab.evaluate("document.querySelectorAll('.choices button')[2].click()")
    assert tab.evaluate("[...document.querySelectorAll('.branch')].filter((one) => one.offsetParent).length") == 3
    tab.evaluate("document.querySelectorAll('.choices button')[0].click()")
    clipped = "document.querySelector('.tokens .clipped')"
    tab.evaluate(f"{clipped}.dispatchEvent(new MouseEvent('mouseover', {{bubbles: true}}))")
    facts = tab.evaluate("document.querySelector('.facts').textContent")
    for words in FACTS:
        assert words in facts, facts
    coloured = f"getComputedStyle({clipped}).backgroundColor"
    colours = set()
    for colouring in ("version", "ratio", "advantage", "surprise"):
        tab.evaluate(
            f"document.querySelector('select[aria-label=\"colour by\"]').value = '{colouring}';"
            "document.querySelector('select[aria-label=\"colour by\"]').dispatchEvent(new Event('change'))"
        )
        colours.add(tab.evaluate(coloured))
    assert len(colours) == 4


@pytest.mark.slow
def test_the_page_follows_a_run_that_trains(tab: Tab, tmp_path: Path) -> None:
    """Opened before its first step. New steps appear on two screens, and none of it is loaded anew; all others open."""
    status = "Number(document.getElementById('state').dataset.step)"
    heading = "document.querySelector('h1').textContent"
    with live_run(tmp_path / "live") as live, served([tmp_path / "live"]) as address:
        show(tab, address, "pulse")
        tab.evaluate("window.stays = true")
        live.begin()
        tab.wait(f"{status} >= 1")
        seen = tab.evaluate(status)
        tab.wait(f"{status} > {seen}")
        tab.evaluate("location.hash = 'timeline'")
        wait_for(tab, "timeline")
        first = tab.evaluate(heading)
        tab.wait(f"{heading} !== '{first}'")
        for screen in SCREENS:
            tab.evaluate(f"location.hash = '{screen}'")
            wait_for(tab, screen)
            assert tab.evaluate("document.querySelectorAll('.error[role=alert]').length") == 0, screen
        live.end()
        tab.evaluate("location.hash = 'pulse'")
        last = json.loads((tmp_path / "live/metrics.jsonl").read_text().splitlines()[-1])["step"]
        tab.wait(f"{status} === {last}")
        assert tab.evaluate("window.stays") and inked(tab)
        tab.leave()


@pytest.mark.slow
def test_a_run_of_500_steps_is_painted_within_a_second(tab: Tab, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """The bound is for a machine that does other things too; the numbers are printed."""
    with served([simulated_run(tmp_path / "long", job=LONG_JOB)]) as address:
        times = [first_paint(tab, address) for _ in range(3)]
        tab.leave()
    with capfd.disabled():
        print("\nfirst paint, screen shown, ms:", *(f"{paint:.0f}, {shown:.0f};" for paint, shown in times))
    assert min(paint for paint, _ in times) < 1000


def test_keys_choose_screens_and_walk_through_tokens(tab: Tab, address: str) -> None:
    show(tab, address, "pulse")
    tab.press("5")
    wait_for(tab, "trajectory")
    tab.evaluate("document.querySelector('.tokens').focus()")
    tab.press("ArrowRight")
    tab.wait("document.querySelector('.facts').textContent.startsWith('token 0')")
    tab.press("2")
    wait_for(tab, "timeline")


def test_the_timeline_is_zoomed_and_moved_by_keys_wheel_and_pointer(tab: Tab, address: str) -> None:
    show(tab, address, "timeline")
    tab.evaluate("document.querySelector('canvas').focus()")
    whole = picture(tab)
    tab.press("+")
    near = picture(tab)
    tab.press("ArrowRight")
    moved = picture(tab)
    assert len({whole, near, moved}) == 3
    tab.press("0")
    assert picture(tab) == whole
    x, y = place(tab)
    tab.mouse("mouseWheel", x, y, deltaX=0, deltaY=-200)
    wheeled = picture(tab)
    tab.mouse("mousePressed", x, y)
    tab.mouse("mouseMoved", x - 200, y)
    tab.mouse("mouseReleased", x - 200, y)
    assert len({whole, wheeled, picture(tab)}) == 3 and "#timeline" in tab.evaluate("location.hash")


@pytest.mark.parametrize(("screen", "tells"), [("timeline", "sampled by v"), ("anatomy", "prompt 2")])
def test_a_picture_tells_of_a_trajectory_and_opens_it_by_keys_and_by_pointer(
    tab: Tab, address: str, screen: str, tells: str
) -> None:
    tip = "(document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent)"
    show(tab, address, screen)
    tab.evaluate("document.querySelector('canvas').focus()")
    for _ in range(3):
        tab.press("ArrowDown")
    assert tells in tab.evaluate(tip)
    at = tab.evaluate("[document.getElementById('tip').offsetLeft - 12, document.getElementById('tip').offsetTop - 12]")
    told = tab.evaluate(tip)
    tab.press("Enter")
    wait_for(tab, "trajectory")
    opened = tab.evaluate("location.hash")
    show(tab, address, screen)
    assert tab.evaluate(tip) == ""
    tab.mouse("mouseMoved", *at)
    assert tab.evaluate(tip) == told
    tab.mouse("mousePressed", *at)
    tab.mouse("mouseReleased", *at)
    wait_for(tab, "trajectory")
    assert tab.evaluate("location.hash") == opened and "ordinal=" in opened


def picture(tab: Tab) -> str:
    return tab.evaluate("document.querySelector('canvas').toDataURL()")


def place(tab: Tab) -> tuple[float, float]:
    """The middle of the first picture."""
    box = "document.querySelector('canvas').getBoundingClientRect()"
    x, y = tab.evaluate(f"[{box}.left + {box}.width / 2, {box}.top + {box}.height / 2]")
    return x, y


def test_light_and_dark_follow_the_system(tab: Tab, address: str) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        show(tab, address, "timeline")
        assert inked(tab)
        grounds.append(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds[0] != grounds[1]


@pytest.mark.slow
def test_a_report_opens_without_a_server(tab: Tab, runs: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    command = [sys.executable, "-m", "scripts.dashboard", *(f"run={run}" for run in runs), "--export", str(output)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    for screen in SCREENS:
        show(tab, output.as_uri(), screen)
        assert tab.evaluate("document.querySelectorAll('.error[role=alert]').length") == 0, screen
    assert f"Question {HOSTILE[:20]}" in show(tab, output.as_uri(), "trajectory")
    show(tab, output.as_uri(), "metrics?text=timing_s/step")
    tab.evaluate("document.querySelector('input[type=checkbox]').click()")
    assert "log=true" in tab.evaluate("location.hash")


def test_an_unknown_run_and_an_unknown_step_are_errors_with_a_way_back(tab: Tab, address: str) -> None:
    text = show(tab, address, "pulse?run=none")
    assert "run=none: there is no such run here" in text and "Pulse of new" in text and "all runs" in text
    text = show(tab, address, "groups?run=new&step=99")
    assert "step=99: no trajectories of that step" in text
    tab.evaluate("[...document.querySelectorAll('#main a')].find((one) => one.textContent === 'Groups of new').click()")
    tab.wait("document.querySelector('h1').textContent === 'Groups of step 8'")
    tab.errors.clear()  # the browser reports the answer of 404


@pytest.mark.slow
def test_the_status_line_is_on_every_screen_and_a_run_that_broke_off_does_not_look_new(
    tab: Tab, tmp_path: Path
) -> None:
    run = tmp_path / "broken"
    run.mkdir()
    (run / "config.yaml").write_text(CONFIG)
    (run / "error.txt").write_text("Traceback\nfailed: ValueError: the data has no rows\n")
    line = "document.getElementById('state').textContent"
    with served([run]) as address:
        for screen in SCREENS:
            show(tab, address, screen)
            told = tab.evaluate(line)
            assert told.startswith("failed before its first step · ValueError: the data has no rows"), screen
        text = show(tab, address, "pulse")
        assert "The run failed before its first step: ValueError: the data has no rows." in text
        assert (
            "nothing was recorded: the run failed before its first step" in text and "nothing recorded yet" not in text
        )
        tab.leave()


def test_charts_are_zoomed_by_dragging_and_show_all_after_a_double_click(tab: Tab, address: str) -> None:
    show(tab, address, "metrics?text=^timing_s/step")
    whole = picture(tab)
    x, y = place(tab)
    tab.mouse("mousePressed", x - 60, y)
    tab.mouse("mouseMoved", x + 40, y)
    tab.mouse("mouseReleased", x + 40, y)
    tab.evaluate("document.querySelector('canvas').dispatchEvent(new MouseEvent('mouseleave'))")
    near = picture(tab)
    tab.evaluate("document.querySelector('canvas').dispatchEvent(new MouseEvent('dblclick'))")
    assert near != whole and picture(tab) == whole


def test_a_mark_explains_a_chart_by_its_key_and_meaning(tab: Tab, address: str) -> None:
    show(tab, address, "pulse")
    tab.evaluate("document.querySelector('.tile .why').dispatchEvent(new MouseEvent('mouseenter'))")
    tip = tab.evaluate("document.getElementById('tip').textContent")
    assert tip.startswith("in the latest step\ncritic/rewards/mean \u2013 ")


def test_keys_go_to_the_next_episode_and_the_next_group_whose_texts_are_in_the_rows(tab: Tab, address: str) -> None:
    text = show(tab, address, "groups?step=8&ordinal=21")
    assert f"Question {HOSTILE[:20]}" in text and f"Answer {HOSTILE[:20]}" in text
    tab.press("n")
    tab.wait("!document.getElementById('main').textContent.includes('Prompt 21:')")  # nor are its keys there any more
    assert "ordinal=21" not in tab.evaluate("location.hash")
    tab.press("p")
    tab.wait("location.hash.includes('ordinal=21')")
    show(tab, address, "trajectory?step=8&ordinal=21&index=0")
    for key, words in (("n", "episode 1"), ("p", "episode 0")):
        tab.press(key)
        tab.wait(f"document.querySelector('h1').textContent === 'Step 8, prompt 21, {words}'")
    tab.press("N")
    tab.wait("!document.querySelector('h1').textContent.includes('prompt 21,')")


def test_versions_that_follow_one_another_differ_by_stripes(tab: Tab, address: str) -> None:
    show(tab, address, "timeline")
    entries = "[...document.querySelectorAll('.legend')[0].children]"
    rows = tab.evaluate(f"{entries}.map((one) => [one.textContent, one.firstChild.className])")
    assert len(rows) > 2 and all((int(name[1:]) % 2 == 1) == (stripes == "striped") for name, stripes in rows)
    assert "trainer:" in tab.evaluate("document.querySelectorAll('.legend')[1].textContent")


@pytest.mark.slow
def test_a_chart_of_a_step_without_a_gradient_says_so(tab: Tab, tmp_path: Path) -> None:
    row = {"timing_s/step": 2.0, "rollout/zero_variance_groups": 1.0, "reward/mine": 0.5}
    with served([run_of_metrics(tmp_path / "flat", [row])]) as address:
        text = show(tab, address, "pulse")
        assert "no group had a gradient, because the rewards within every group were equal" in text
        assert "this run has not recorded perf/trainer_idle, perf/replica_idle" in text
        assert "reward/mine" in show(tab, address, "metrics?text=mine")
        tab.leave()


def run_of_metrics(run: Path, rows: list[dict[str, float]]) -> Path:
    """Write a run of these metrics, a step each."""
    run.mkdir()
    (run / "config.yaml").write_text(CONFIG)
    lines = [json.dumps({"step": step, "time": 1.0 * step, **row}) + "\n" for step, row in enumerate(rows, 1)]
    (run / "metrics.jsonl").write_text("".join(lines))
    return run


MINE = [4.0, 0.0, 2.0, -1.0, 8.0, 400.0]
SMOOTHED_BY_HALF = [4.0, 1.333333, 1.714286, 0.266667, 4.258065, 205.269841]
"""MINE as an exponential moving average of weight 0.5, without the bias of its beginning."""
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE_NAME = '=cmd|"a",<b>/mine'


@pytest.fixture(scope="module")
def own_metrics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    rows = [{"timing_s/step": 2.0, "reward/mine": value, HOSTILE_NAME: value, "below": -1.0} for value in MINE]
    with served([run_of_metrics(tmp_path_factory.mktemp("own") / "own", rows)]) as address:
        yield address


@pytest.mark.slow
def test_the_moving_average_begins_where_the_values_do(tab: Tab, own_metrics: str) -> None:
    show(tab, own_metrics, "metrics")
    points = json.dumps([[step, value] for step, value in enumerate(MINE)])
    average = tab.evaluate(f"movingAverage({points}, 0.5).map((point) => point[1])")
    assert average == pytest.approx(SMOOTHED_BY_HALF, abs=1e-5)
    assert tab.evaluate(f"movingAverage({points}, 0).map((point) => point[1])") == MINE


def test_ticks_differ_from_one_another(tab: Tab, own_metrics: str) -> None:
    show(tab, own_metrics, "metrics")
    texts = tab.evaluate("[percent, short].map((format) => tickTexts(ticks(0, 0.021), format))")
    assert texts == [["0.0%", "0.5%", "1.0%", "1.5%", "2.0%"], ["0.000", "0.005", "0.010", "0.015", "0.020"]]


@pytest.mark.slow
def test_the_largest_staleness_is_never_smoothed(tab: Tab, tmp_path: Path) -> None:
    """A mean of maxima is no staleness that anything had."""
    rows = [{"timing_s/step": 2.0, "staleness/max": 1.0 + step % 2, "staleness/mean": step % 2} for step in range(60)]
    with served([run_of_metrics(tmp_path / "long", rows)]) as address:
        show(tab, address, "metrics")
        tab.evaluate("seen = []; plain = smoothed; smoothed = (points, n) => (seen.push(points), plain(points, n)); 0")
        tab.evaluate("location.hash = 'pulse'")
        wait_for(tab, "pulse")
        drawn = tab.evaluate("seen.map((points) => points.map((point) => point[1]))")
        tab.leave()
    assert [row["staleness/mean"] for row in rows] in drawn and [row["staleness/max"] for row in rows] not in drawn


def test_smoothing_is_drawn_at_once_and_stays_in_the_address(tab: Tab, own_metrics: str) -> None:
    show(tab, own_metrics, "metrics?text=reward/mine")
    slider, hash_of = "document.querySelector('input[type=range]')", "location.hash"
    assert tab.evaluate(f"{slider}.value") == "0"  # few steps: nothing is smoothed unless somebody chooses it
    raw = picture(tab)
    tab.evaluate(f"window.stays = true; {slider}.value = 0.5; {slider}.dispatchEvent(new Event('input'))")
    tab.wait(f"document.querySelector('canvas').toDataURL() !== {json.dumps(raw)}")
    tab.evaluate(f"{slider}.dispatchEvent(new Event('change'))")
    assert "smoothing=0.5" in tab.evaluate(hash_of) and tab.evaluate("window.stays")
    smooth = picture(tab)
    show(tab, own_metrics, tab.evaluate(hash_of)[1:])  # as from a bookmark
    assert picture(tab) == smooth and tab.evaluate(f"{slider}.value") == "0.5"
    tab.evaluate("[...document.querySelectorAll('button')].find((one) => one.textContent === 'timing_s').click()")
    tab.wait("location.hash.includes('timing_s') && document.getElementById('main').ariaBusy === 'false'")
    assert tab.evaluate(f"{slider}.value") == "0.5"
    show(tab, own_metrics, "metrics?text=reward/mine&smoothing=2")
    assert tab.evaluate(f"{slider}.value") == "0" and picture(tab) == raw


@pytest.mark.slow
def test_a_long_run_is_smoothed_unless_the_address_says_otherwise(tab: Tab, tmp_path: Path) -> None:
    rows = [{"timing_s/step": 2.0 + step % 7} for step in range(60)]
    with served([run_of_metrics(tmp_path / "long", rows)]) as address:
        values = []
        for more in ("", "?smoothing=0"):
            show(tab, address, f"metrics{more}")
            values.append(tab.evaluate("document.querySelector('input[type=range]').value"))
        tab.leave()
    assert values == ["0.9", "0"]


def test_a_logarithmic_axis_leaves_out_what_it_cannot_show_and_says_so(tab: Tab, own_metrics: str) -> None:
    text = show(tab, own_metrics, "metrics?text=mine|below")
    assert "left out" not in text
    linear = picture(tab)
    tab.evaluate("document.querySelector('input[type=checkbox]').click()")
    tab.wait(f"document.querySelector('canvas').toDataURL() !== {json.dumps(linear)}")
    text = tab.evaluate("document.getElementById('main').textContent")
    assert text.count("left out: 2 values at or below 0") == 2
    assert "every value is at or below 0, which a logarithmic axis cannot show" in text
    assert "log=true" in tab.evaluate("location.hash") and inked(tab)
    lengths = "pieces([[1, 4], [2, 0], [3, 2], [4, -1], [5, 8], [6, 9]], true).map((one) => one.length)"
    assert tab.evaluate(lengths) == [1, 1, 2]
    assert tab.evaluate("logTicks(-1, 1)") == pytest.approx([0.1, 0.2, 0.5, 1, 2, 5, 10])
    texts = "1e-4 2e-4 5e-4 0.001 0.002 0.005 0.01"
    assert tab.evaluate("logTicks(-4, -2).map(logTickText)") == texts.split()
    assert tab.evaluate("logTicks(-8, 4)") == pytest.approx([1e-8, 1e-6, 1e-4, 1e-2, 1, 1e2, 1e4])
    assert tab.evaluate("logTicks(0, 0.1)") == pytest.approx([1, 1.1, 1.2])


def saved(tab: Tab, folder: Path, name: str, kind: str) -> str:
    """Press the button that saves the only chart, and return what the file has."""
    tab.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    button = "[...document.querySelectorAll('button.save')].filter((one) => one.ariaLabel === {})"
    tab.evaluate(f"{button.format(json.dumps(f'save {name} as {kind}'))}[0].click()")
    until = time.monotonic() + 20
    while not (files := list(folder.glob(f"own-*.{kind.lower()}"))):
        assert time.monotonic() < until, list(folder.iterdir())
        time.sleep(0.05)
    return files[0].read_bytes().decode()


def test_a_chart_is_saved_as_numbers_and_as_a_picture(tab: Tab, own_metrics: str, tmp_path: Path) -> None:
    show(tab, own_metrics, "metrics?text=reward/mine&smoothing=0.5&log=true")
    head, *rows = csv.reader(saved(tab, tmp_path, "reward/mine", "CSV").splitlines())
    assert head == ["step", "reward/mine", "reward/mine (smoothed 0.5)"]
    assert [(int(row[0]), float(row[1])) for row in rows] == [*enumerate(MINE, 1)]  # what the axis leaves out, too
    assert [float(row[2]) for row in rows] == pytest.approx(SMOOTHED_BY_HALF, abs=1e-5)
    drawn = ElementTree.fromstring(saved(tab, tmp_path, "reward/mine", "SVG"))
    kinds = {element.tag.removeprefix(SVG) for element in drawn.iter()}
    assert drawn.tag == f"{SVG}svg" and {"path", "text", "clipPath"} <= kinds
    texts = [element.text for element in drawn.iter(f"{SVG}text")]
    assert texts[0] == "reward/mine \u00b7 own" and "100" in texts
    assert not [value for element in drawn.iter() for value in element.attrib.values() if "NaN" in value]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own-reward_mine.csv", "own-reward_mine.svg"]


def test_a_hostile_name_is_a_name_in_a_saved_file(tab: Tab, own_metrics: str, tmp_path: Path) -> None:
    show(tab, own_metrics, "metrics?text=cmd")
    head, *_ = csv.reader(saved(tab, tmp_path, HOSTILE_NAME, "CSV").splitlines())
    assert head == ["step", f"'{HOSTILE_NAME}"]  # no formula to a spreadsheet
    drawn = ElementTree.fromstring(saved(tab, tmp_path, HOSTILE_NAME, "SVG"))
    assert next(drawn.iter(f"{SVG}text")).text == f"{HOSTILE_NAME} \u00b7 own"
