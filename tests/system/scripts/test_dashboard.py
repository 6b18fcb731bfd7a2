"""The page in a real browser: every screen on a run's folder, live, in light and dark, and as one file."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Tab, find_browser, first_paint, opened_browser, served
from tests.support.dashboards import BRANCHED, HOSTILE, LIVE_JOB, LONG_JOB, live_run, simulated_run
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="needs a Chromium in PATH (Debian: apt-get install chromium)"
)
SCREENS = {
    "pulse": ("Reward and held-out accuracy", "Staleness of the tokens of step 8"),
    "timeline": ("Timeline, steps 6 to 8", "v5", "v6"),
    "anatomy": ("Batch of step 8", "Step 8 took", "21"),
    "groups": ("Groups of step 8", "1 to 3 of 3", "<script>"),
    "groups?step=8&ordinal=21": ("Prompt 21: its 3 trajectories", "open 2"),
    "trajectory?step=8&ordinal=21&index=0": ("Step 8, prompt 21, episode 0", "trained by step 8 on v7", "<img src=x"),
    "fleet": ("replica-1 is given up: <script>", "the run ended with: it broke", "v8"),
    "files": ("max_staleness: 2", "began", "driver.log"),
    "compare": ("with", "old", "staleness/max"),
}
OPENED = (
    "document.body.dataset.screen === '{}' && document.getElementById('main').getAttribute('aria-busy') === 'false'"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [simulated_run(folder / "new"), simulated_run(folder / "old", tells=False)]


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


def show(tab: Tab, address: str, screen: str) -> str:
    tab.open(f"{address}#{screen}")
    tab.wait(OPENED.format(screen.partition("?")[0]))
    return tab.evaluate("document.getElementById('main').textContent")


def inked(tab: Tab) -> bool:
    """Whether every canvas has something on it."""
    return tab.evaluate(
        "[...document.querySelectorAll('canvas')].every((one) => "
        "one.getContext('2d').getImageData(0, 0, one.width, one.height).data.some((value) => value > 0))"
    )


@pytest.mark.parametrize("screen", SCREENS)
def test_every_screen_shows_the_run_and_keeps_its_text_as_text(tab: Tab, address: str, screen: str) -> None:
    text = show(tab, address, screen)
    assert [words for words in SCREENS[screen] if words not in text] == []
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
    expected = ("common to sequences 1, 2, 3", "sequence 1: from here on its own", "turn 1, sampled by v", "prompt")
    assert [words for words in expected if words not in text] == []
    assert tab.evaluate("document.querySelectorAll('.branch').length") == 5
    tab.evaluate("document.querySelectorAll('.choices button')[2].click()")
    assert tab.evaluate("[...document.querySelectorAll('.branch')].filter((one) => one.offsetParent).length") == 3
    tab.evaluate("document.querySelectorAll('.choices button')[0].click()")
    clipped = "document.querySelector('.tokens .clipped')"
    tab.evaluate(f"{clipped}.dispatchEvent(new MouseEvent('mouseover', {{bubbles: true}}))")
    facts = tab.evaluate("document.querySelector('.facts').textContent")
    for words in ("sampled by v", "rollout logprob -", "trainer logprob -", "ratio ", "trained clipped", "advantage "):
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
    """Opened before its first step; no screen is loaded anew."""
    with live_run(tmp_path / "live") as begin, served([tmp_path / "live"]) as address:
        show(tab, address, "pulse")
        tab.evaluate("window.stays = true")
        begin()
        tab.wait("document.getElementById('status').textContent === 'step 2'")
        tab.evaluate("location.hash = 'timeline'")
        tab.wait(OPENED.format("timeline"))
        first = tab.evaluate("document.querySelector('h1').textContent")
        tab.wait(f"document.querySelector('h1').textContent > '{first}'")
        tab.evaluate("location.hash = 'pulse'")
        tab.wait(f"document.getElementById('status').textContent === 'step {LIVE_JOB.num_steps}'")
        assert tab.evaluate("window.stays") and inked(tab)


def test_a_run_of_500_steps_is_painted_within_a_second(tab: Tab, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """The bound is for a machine that does other things too; the number is printed."""
    run = simulated_run(tmp_path / "long", job=LONG_JOB)
    with served([run]) as address:
        times = [first_paint(tab, address) for _ in range(3)]
    with capfd.disabled():
        print("\nfirst paint, screen shown, ms:", *(f"{paint:.0f}, {shown:.0f};" for paint, shown in times))
    assert min(paint for paint, _ in times) < 1000


def test_keys_choose_screens_and_walk_through_tokens(tab: Tab, address: str) -> None:
    show(tab, address, "pulse")
    tab.press("5")
    tab.wait(OPENED.format("trajectory"))
    tab.evaluate("document.querySelector('.tokens').focus()")
    tab.press("ArrowRight")
    tab.wait("document.querySelector('.facts').textContent.startsWith('token 0')")
    tab.press("2")
    tab.wait(OPENED.format("timeline"))


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
    for screen in ("pulse", "timeline", "anatomy", "groups", "trajectory", "fleet", "files", "compare"):
        show(tab, output.as_uri(), screen)
        assert tab.evaluate("document.querySelectorAll('.error[role=alert]').length") == 0, screen
    assert f"Question {HOSTILE[:20]}" in show(tab, output.as_uri(), "trajectory")
