"""Audit the records of a run: was every prompt trained once, within the bound, and is every record there?

slipstream audit RUN_DIR [--records] [--summary]

Prints the report as JSON, and one sentence about it on standard error. --records leaves out the checkpoints, which take
minutes to read where they are large. --summary reads on standard input what summary.json should hold, which a full disk
may have kept from being written: a run without it is audited as one that was killed. Exit code: 0, or 1 when something
is missing, damaged or contradicts what the run counted, and for a folder that holds no run.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from scripts.observe.audit import audit
from scripts.observe.files import RunError

FAILED = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument("--records", action="store_true", help="leave out the checkpoints")
    parser.add_argument("--summary", action="store_true", help="read summary.json on standard input")
    options = parser.parse_args()
    try:
        summary = json.load(sys.stdin) if options.summary else None
        report = audit(options.run_dir, summary, checkpoints=not options.records)
    except RunError as error:
        sys.stderr.write(f"audit: {error}\n")
        return FAILED
    sys.stdout.write(json.dumps(asdict(report), indent=2) + "\n")
    sys.stderr.write(f"{report.sentence}\n")
    return FAILED if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
