"""The page in a real browser: every screen on a run's folder, live, in light and dark, and as one file."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Tab, find_browser, opened_browser
from tests.support.dashboards import BRANCHED, CONFIG, HOSTILE, LONG_JOB, live_run, simulated_run
from tests.support.page import SCREENS, first_paint, served, show, wait_for
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="needs a Chromium in PATH (Debian: apt-get install chromium)"
)
WORDS = {
    "pulse": ("Reward and held-out accuracy", "Staleness of the tokens of step 8"),
    "timeline": ("Timeline, steps 6 to 8", "v5", "v6"),
    "anatomy": ("Batch of step 8", "Step 8 took", "21"),
    "groups": ("Groups of step 8", "1 to 3 of 3", "<script>"),
    "groups?step=8&ordinal=21": ("Prompt 21: its 3 trajectories", "open 2"),
    "trajectory?step=8&ordinal=21&index=0": ("Step 8, prompt 21, episode 0", "trained by step 8 on v7", "<img src=x"),
    "fleet": ("replica-1 is given up: <script>", "the run ended with: it broke", "v8"),
    "files": ("max_staleness: 2", "began", "driver.log"),
    "compare": ("with", "old", "staleness/max", "Keys that differ", "rollout.max_num_seqs", "64", "16"),
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
"""Of the sixth loss token, the first that `made_of` clips and does not reject."""


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
        yield tab


@pytest.fixture
def tab(browser: Tab) -> Iterator[Tab]:
    """No test leaves an error on the console."""
    browser.errors.clear()
    yield browser
    assert browser.errors == []


def inked(tab: Tab) -> bool:
    """Whether every canvas has something on it."""
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


def test_a_run_of_an_older_version_opens(tab: Tab, address: str) -> None:
    for screen, words in [("timeline", "has no events.jsonl"), ("anatomy", "no events"), ("fleet", "no events.jsonl")]:
        assert words in show(tab, address, f"{screen}?run=old")


def test_a_session_is_shown_by_messages_and_branches_and_tokens_say_what_the_trainer_made_of_them(
    tab: Tab, address: str
) -> None:
    first = 3 * (BRANCHED - 1)
    text = show(tab, address, f"trajectory?step={BRANCHED}&ordinal={first}&index=0")
    expected = (
        "common to sequences 1, 2, 3",
        "sequence 1: from here on its own",
        "turn 1 goes on, sampled by v",
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


def test_the_page_follows_a_file_that_grows(tab: Tab, address: str, runs: list[Path]) -> None:
    show(tab, address, "pulse")
    with (runs[0] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 99, "time": 1.0, "critic/rewards/mean": 0.625}) + "\n")
    tab.wait("document.getElementById('status').textContent === 'step 99'")
    tab.wait("document.querySelector('.tile b').textContent === '0.625'")


def test_the_page_follows_a_run_that_trains(tab: Tab, tmp_path: Path) -> None:
    """Opened before its first step. New steps appear on two screens, and none of it is loaded anew; all others open."""
    status = "Number(document.getElementById('status').textContent.replace('step ', ''))"
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


def test_a_report_opens_without_a_server(tab: Tab, runs: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    command = [sys.executable, "-m", "scripts.dashboard", *(f"run={run}" for run in runs), "--export", str(output)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    for screen in SCREENS:
        show(tab, output.as_uri(), screen)
        assert tab.evaluate("document.querySelectorAll('.error[role=alert]').length") == 0, screen
    assert f"Question {HOSTILE[:20]}" in show(tab, output.as_uri(), "trajectory")
