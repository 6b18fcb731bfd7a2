"""Logs of processes stay within a size."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.launch.process_logs import cut
from tests.support.paths import ROOT


def test_a_log_that_is_too_long_keeps_its_end_and_says_so(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "a.log"
    log.parent.mkdir()
    log.write_bytes(b"0123456789")
    cut(log, limit=10, kept=4)
    assert log.read_bytes() == b"0123456789"
    with log.open("ab") as writer:
        writer.write(b"ab")
        writer.flush()
        cut(log, limit=10, kept=4)
        writer.write(b"cd")
    assert log.read_bytes() == b"[the log was longer than 10 bytes: the first 8 are gone]\n89abcd"
    cut(tmp_path / "none.log", limit=10, kept=4)


def test_what_a_process_and_its_children_print_is_kept_small(tmp_path: Path) -> None:
    program = f"""
import subprocess, sys, time
from pathlib import Path
from scripts.launch import process_logs
process_logs.LOOK_S, process_logs.LIMIT_BYTES, process_logs.KEPT_BYTES = 0.05, 10_000, 100
path = Path({str(tmp_path / "a.log")!r})
process_logs.write_output_to(path)
print("first", flush=True)
subprocess.run([sys.executable, "-c", "print('x' * 50_000)"], check=True)
while path.stat().st_size > 10_000:
    time.sleep(0.01)
print("last", flush=True)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
    text = (tmp_path / "a.log").read_text()
    assert text.startswith("[the log was longer than 10000 bytes") and text.endswith("x\nlast\n") and len(text) < 300


class Printer:
    """Prints more than any buffer holds."""

    def score(self) -> str:
        print("x\n" * 50_000)
        return "printed"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_a_full_disk_costs_what_is_printed_and_no_process_that_prints(tmp_path: Path) -> None:
    program = f"""
import asyncio, pickle
from pathlib import Path
from rollout.actors.resident import Resident
from scripts.launch.process_logs import write_output_to
from tests.unit.scripts.launch.test_process_logs import Printer

async def main():
    write_output_to(Path({str(tmp_path / "a.log")!r}))
    print("x\\n" * 50_000)
    resident = await Resident.start(pickle.dumps(Printer()), "a reward", 60.0, "key")
    said = await resident.call("score", (), "a reward", 60.0, "key")
    resident.end()
    Path({str(tmp_path / "said")!r}).write_text(said)

if __name__ == "__main__":
    asyncio.run(main())
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    (tmp_path / "a.log").symlink_to("/dev/full")
    (tmp_path / "program.py").write_text(program)
    subprocess.run([sys.executable, tmp_path / "program.py"], cwd=ROOT, check=True, timeout=60, env=environment)
    assert (tmp_path / "said").read_text() == "printed"
