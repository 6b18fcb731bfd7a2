"""The files of the page: readable in both schemes, nothing from elsewhere, and no way for text to become markup."""

import re

import pytest

from scripts.dashboard.app import STATIC

BLOCKS = re.findall(r":root \{(.*?)\}", (STATIC / "style.css").read_text(), re.DOTALL)
TEXT, LINES = ("--ink", "--muted", "--accent", "--good", "--bad", "--warn"), ("--s0", "--s1", "--s2", "--s3")


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2.2)."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("block", BLOCKS, ids=["light", "dark"])
def test_text_and_lines_stand_out_in_both_schemes(block: str) -> None:
    """The contrasts are those that WCAG asks for: 4.5 for text, 3 for what is drawn."""
    colours = dict(re.findall(r"(--[\w]+): (#[0-9a-f]{6})", block))
    assert {*TEXT, *LINES, "--card", "--ground"} <= colours.keys()
    for name in (*TEXT, *LINES):
        for ground in ("--card", "--ground"):
            least = 4.5 if name in TEXT else 3
            assert contrast(colours[name], colours[ground]) >= least, (name, ground)
