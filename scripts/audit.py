"""Audits what a run has recorded: was every prompt trained once, within the bound, and is every record there?

python -m scripts.audit RUN_DIR

Exit code: 0, or 1 when something is missing, damaged or contradicts what the run counted.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from trainer.tracking.audit import audit
from trainer.tracking.plans import NoRunError


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("audit: python -m scripts.audit RUN_DIR")
    try:
        found = audit(Path(sys.argv[1]))
    except NoRunError as error:
        sys.exit(f"audit: {error}")
    sys.stdout.write(json.dumps(asdict(found), indent=2) + "\n")
    if found.findings:
        sys.exit(f"audit: {len(found.findings)} finding(s)")


if __name__ == "__main__":
    main()
