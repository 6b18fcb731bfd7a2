"""What a run has trained, read from its trajectory log: each prompt once, versions in order, within the bound.

python -m scripts.audit RUN_DIR
"""

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.tracking.recorder import TRAJECTORIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    steps: int
    trajectories: int
    prompts: int
    """Different ones."""
    lost: int
    """Ordinals below the highest trained one that were not. Of a run that is over, prompts that were lost, unless they
    were filtered out, dropped or given up, which the run counts."""
    twice: int
    """Ordinals that more than one step trained, or one step more than once."""
    missing_steps: int
    descending_versions: int
    """Trajectories with a token of an older version than the one before it."""
    newer_versions: int
    """Trajectories with a token of weights that were not there when the step that trained it began."""
    max_staleness: int
    """The most optimizer steps between the weights that sampled a token and the step that trained it."""


def audit(run_dir: Path) -> Audit:
    """Raises ValueError where a record is damaged, naming file and line."""
    files = sorted((run_dir / TRAJECTORIES).glob("step_*.jsonl"))
    steps_of: Counter[int] = Counter()
    seen: set[tuple[int, int]] = set()
    again: set[int] = set()
    num_trajectories = descending = newer = staleness = 0
    steps = [int(file.stem.removeprefix("step_")) for file in files]
    for step, file in zip(steps, files, strict=True):
        ordinals: set[int] = set()
        with file.open(encoding="utf-8") as opened:
            lines = list(opened)  # not splitlines(): a response may hold characters that it splits at
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                versions = [version for _, _, version in record["versions"]]
                ordinal, index = record["ordinal"], record["index"]
            except (ValueError, KeyError) as error:
                raise ValueError(f"{file}:{number}: damaged record: {error!r}") from error
            num_trajectories += 1
            ordinals.add(ordinal)
            if (ordinal, index) in seen:
                again.add(ordinal)
            seen.add((ordinal, index))
            descending += not ascends(versions)
            newer += max(versions, default=0) > step - 1
            staleness = max(staleness, step - 1 - min(versions, default=step - 1))
        steps_of.update(ordinals)
        again |= {ordinal for ordinal in ordinals if steps_of[ordinal] > 1}
    return Audit(
        steps=len(steps),
        trajectories=num_trajectories,
        prompts=len(steps_of),
        lost=max(steps_of, default=-1) + 1 - len(steps_of),
        twice=len(again),
        missing_steps=max(steps, default=0) - len(steps),
        descending_versions=descending,
        newer_versions=newer,
        max_staleness=staleness,
    )


def ascends(versions: list[int]) -> bool:
    """Versions of a trajectory's tokens, in their order."""
    return versions == sorted(versions)


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("audit: python -m scripts.audit RUN_DIR")
    sys.stdout.write(json.dumps(asdict(audit(Path(sys.argv[1]))), indent=2) + "\n")


if __name__ == "__main__":
    main()
