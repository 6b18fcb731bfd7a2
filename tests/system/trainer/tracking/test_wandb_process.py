"""The real wandb, offline: what is on disk after a run, and that no process of it is left."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

OFFLINE_RUN = """
import os, sys
from pathlib import Path
from configs.schema import WandbConfig
from trainer.tracking.wandb.sink import WandbSink

named = WandbConfig(name="test", entity="us", group="ablation", tags=["first", "second"])
sink = WandbSink(Path(sys.argv[1]), named, {"group_size": 8})
assert os.waitpid(-1, os.WNOHANG) == (0, 0), "wandb started no helper, so the check below would show nothing"
for step in (0, 1, 2):
    sink.log(step, {"critic/rewards/mean": 0.1 * step, "nan": float("nan")})
sink.close(0)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:  # no child is left, not even a dead one
    sys.exit(0)
sys.exit("wandb's helper process outlives close()")
"""


@pytest.mark.slow
def test_wandb_offline_writes_under_the_run_folder_quietly_and_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OFFLINE_RUN, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    written = file.read_bytes()
    assert b"critic/rewards/mean" in written
    assert all(text in written for text in (b"group_size", b"ablation", b"second"))
