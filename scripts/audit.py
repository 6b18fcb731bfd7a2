"""Audit the records of a run: was every prompt trained once, within the bound, and is every record there?

slipstream audit RUN_DIR [--records] [--summary]

Prints the report as JSON, and one sentence about it on standard error. --records leaves out the checkpoints, which take
minutes to read where they are large. --summary reads on standard input what summary.json should hold, which a full disk
may have kept from being written: a run without it is audited as one that was killed. Exit code: 0, or 1 when something
is missing, damaged or contradicts what the run counted, and for a folder that holds no run.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from scripts.observe.audit import audit
from scripts.observe.files import RunError

FAILED = 1


def main() -> int:
    options = {"--records", "--summary"} & {*sys.argv[1:]}
    folders = [word for word in sys.argv[1:] if word not in options]
    if len(folders) != 1 or folders[0].startswith("-"):
        sys.stderr.write("audit: slipstream audit RUN_DIR [--records] [--summary]\n")
        return FAILED
    try:
        summary = json.load(sys.stdin) if "--summary" in options else None
        report = audit(Path(folders[0]), summary, checkpoints="--records" not in options)
    except RunError as error:
        sys.stderr.write(f"audit: {error}\n")
        return FAILED
    sys.stdout.write(json.dumps(asdict(report), indent=2) + "\n")
    sys.stderr.write(f"{report.sentence}\n")
    return FAILED if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
