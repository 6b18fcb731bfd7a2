"""The parts of the benchmark of weight updates that need an engine, at their smallest: what they count, not how long it
takes."""

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.nightly


def test_pause_and_keep_at_the_smallest_size() -> None:
    # A pause is the difference of two times: of one update alone it may come out below 0 on a busy machine.
    options = ["--only", "pause", "keep", "--sizes", "1", "--repeats", "3", "--seconds", "0.1"]
    output = subprocess.run(
        [sys.executable, "-m", "scripts.bench.weight_sync", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=200,
    ).stdout
    # vLLM's processes log to the same stream.
    lines = [line for line in output.rstrip().splitlines() if not line.startswith(("(MainProcess", "(EngineCore"))]
    *_, pauses, keep, last = "\n".join(lines).split("\n\n")
    arms = [f"{place}, {transport}" for transport in ("shared_memory", "collective") for place in ("staged", "inside")]
    arms.append("adapter, shared_memory")
    assert [line.partition("  ")[0] for line in pauses.splitlines()[3:]] == arms
    assert [line.split()[0] for line in keep.splitlines()[3:]] == ["keep", "abort", "recompute"]
    results = json.loads(last)
    measured = {f"{way}_tokens_per_s" for way in ("keep", "abort", "recompute")}
    measured |= {"pause_ms_1m", "pause_over_floor", "publish_over_memcpy"}
    measured |= {"inside_over_staged", "inside_over_staged_shared_memory", "adapter_over_full"}
    assert all(results[name] > 0 for name in measured)
    assert results["keep_reprefill_tokens"] == 0
    assert 0.01 < results["adapter_bytes_over_full"] < 0.1
    prompt_tokens = 32 * 80  # at least
    assert results["abort_reprefill_tokens"] > prompt_tokens and results["recompute_reprefill_tokens"] > prompt_tokens
