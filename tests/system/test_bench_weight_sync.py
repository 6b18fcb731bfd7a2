"""The parts of the benchmark of weight updates that need an engine, at their smallest: what they count, not how long it
takes."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPO_ROOT = Path(__file__).resolve().parents[2]


def test_pause_and_keep_at_the_smallest_size() -> None:
    options = ["--only", "pause", "keep", "--sizes", "1", "--repeats", "1", "--seconds", "0.1"]
    output = subprocess.run(
        [sys.executable, "-m", "scripts.bench_weight_sync", *options],
        cwd=REPO_ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=200,
    ).stdout
    *_, pauses, keep, last = output.rstrip().split("\n\n")
    arms = [f"{place}, {transport}" for transport in ("shared_memory", "collective") for place in ("staged", "inside")]
    assert [line.partition("  ")[0] for line in pauses.splitlines()[3:]] == arms
    assert [line.split()[0] for line in keep.splitlines()[3:]] == ["keep", "abort", "recompute"]
    results = json.loads(last)
    assert all(results[f"{way}_tokens_per_s"] > 0 for way in ("keep", "abort", "recompute"))
    assert results["publish_over_memcpy"] > 0
    # Differences of two times each, of a single update: they may come out below 0 here.
    pauses_of = {"pause_ms_1m", "pause_over_floor", "inside_over_staged", "inside_over_staged_shared_memory"}
    pauses_of |= {f"{way}_pause_ms" for way in ("keep", "abort", "recompute")}
    assert all(math.isfinite(results[name]) for name in pauses_of)
    assert results["keep_reprefill_tokens"] == 0
    prompt_tokens = 32 * 80  # at least
    assert results["abort_reprefill_tokens"] > prompt_tokens and results["recompute_reprefill_tokens"] > prompt_tokens
