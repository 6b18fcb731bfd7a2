"""Audits the trajectory log of a run: is each prompt trained once, with versions in order and within the bound?

python -m scripts.audit RUN_DIR
"""

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from omegaconf import OmegaConf

from rollout.types import staleness
from trainer.tracking.recorder import TRAJECTORIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    steps: int
    trajectories: int
    prompts: int
    """Different prompts."""
    lost: int
    """Ordinals below the highest trained one that were not trained, those too that the run filtered out, dropped or
    gave up."""
    twice: int
    """Ordinals that were trained in more than one step, or more than once in a step."""
    missing_steps: int
    descending_versions: int
    """Trajectories with a token of an older version than the token before it."""
    newer_versions: int
    """Trajectories with a token of weights that did not exist when the step that trained it began."""
    max_staleness: int
    """Of all trained tokens, in versions: compare with rollout.max_staleness."""


def audit(run_dir: Path, interval: int = 1) -> Audit:
    """Audit the trajectory log of a run with this weight_sync.interval. Raises ValueError for a damaged record."""
    files = sorted((run_dir / TRAJECTORIES).glob("step_*.jsonl"))
    steps_of: Counter[int] = Counter()
    seen: set[tuple[int, int]] = set()
    again: set[int] = set()
    num_trajectories = descending = newer = stalest = 0
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
            stalest = max([stalest, *(staleness(version, step - 1, interval) for version in versions)])
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
        max_staleness=stalest,
    )


def ascends(versions: list[int]) -> bool:
    """Whether no version is older than the one before it."""
    return versions == sorted(versions)


def configured_interval(run_dir: Path) -> int:
    """Return weight_sync.interval from the run's config.yaml."""
    return OmegaConf.load(run_dir / "config.yaml").weight_sync.interval


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("audit: python -m scripts.audit RUN_DIR")
    run_dir = Path(sys.argv[1])
    sys.stdout.write(json.dumps(asdict(audit(run_dir, configured_interval(run_dir))), indent=2) + "\n")


if __name__ == "__main__":
    main()
