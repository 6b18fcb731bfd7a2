"""The command line of a replay, and the folders that it leaves."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

from omegaconf import OmegaConf

from configs.checkpoint import CONFIG_FILE
from configs.cli.arguments import Arguments
from configs.schema import AlgorithmConfig
from configs.validate import ConfigError
from scripts.command.run_folder import LOCK_FILE
from scripts.observe.files import RunError
from scripts.observe.run import EXACT, REPLAYS, Run, run_folder
from scripts.observe.status import REPLAY
from scripts.replay.plan import ReplayPlan, make_plan, parse_steps
from trainer.tracking.recorder import ACCURACY, SUMMARY_FILE
from trainer.tracking.sinks import METRICS_FILE, JsonlSink, write_atomically

REMAX = "remax"
MOST_NAME_CHARS = 110
"""The longest beginning of changes that names a folder."""
OWN = ("steps", "from", "evaluate")
LEARNED_BY = ("algorithm.", "critic.", "trainer.")
"""The beginnings of the keys that say what is learned from rollouts."""
OF_SOURCE = "data.sources.{}.loss_coef"
"""The key of each source that says so, too."""
SAMPLED_BY = (
    *("algorithm.group_size", "algorithm.filter_groups", "algorithm.max_sample_batches"),
    *("algorithm.overlong_buffer_tokens", "algorithm.overlong_penalty"),
    *("trainer.total_steps", "trainer.prompts_per_step", "trainer.num_ranks", "trainer.record_tokens"),
)
"""The keys among them that decided what the records hold, or on what machine it was trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A command line of a replay."""

    run: Run
    plan: ReplayPlan
    changes: Sequence[tuple[str, ...]]
    """The `key=value` of each replay with other values, one after another; none: the run as it was."""
    evaluates: bool

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Request":
        """Parse the command line. Raise RunError or ConfigError, which name the word and what is allowed."""
        if not words or "=" in words[0]:
            raise RunError("the first word must be the folder of a run: slipstream replay RUN [steps=A:B] [KEY=VALUE]")
        folder, own, overrides = run_folder(words[0]), dict[str, str](), list[str]()
        run = Run.open(folder)
        of_sources = {OF_SOURCE.format(name) for name in (run.config().get("data") or {}).get("sources") or {}}
        for word in words[1:]:
            key, equals, value = word.partition("=")
            if not equals:
                raise RunError(f"{word}: must be key=value; {', '.join(OWN)} or a key of the config")
            if key in OWN:
                own[key] = value
            else:
                if key not in of_sources:
                    _refuse_sampled(key, of_sources)
                overrides.append(word)
        if own.get("evaluate", "false") not in ("true", "false"):
            raise RunError(f"evaluate={own['evaluate']}: must be true or false")
        first, last = parse_steps(own.get("steps", ":"))
        checkpoint = Path(own["from"]).expanduser().resolve() if "from" in own else None
        plan = make_plan(run, first=first, last=last, checkpoint=checkpoint)
        changes = Arguments(("-m", *overrides)).jobs() if overrides else []
        for each in changes:
            for segment in plan.changed(each):  # a value that cannot work is an error before anything starts
                _refuse_unrecorded(segment.config.algorithm, plan.config.algorithm)
        return cls(run=run, plan=plan, changes=changes, evaluates=own.get("evaluate") == "true")


def _refuse_sampled(key: str, of_sources: Collection[str]) -> None:
    if not key.startswith(LEARNED_BY) or key in SAMPLED_BY:
        learned_by = ", ".join([*LEARNED_BY, *sorted(of_sources)])
        raise ConfigError(
            f"{key}: a replay changes what is learned from rollouts that there are ({learned_by}), not what was "
            "sampled and by whom: that takes another run"
        )


def _refuse_unrecorded(algorithm: AlgorithmConfig, before: AlgorithmConfig) -> None:
    """Raise ConfigError for a change that needs records which only a run with that value has."""
    if algorithm.advantage == REMAX != before.advantage:
        raise ConfigError(
            f"algorithm.advantage={REMAX}: compares with greedy responses, of which a run with "
            f"algorithm.advantage={before.advantage} has sampled none"
        )
    if algorithm.needs_old_versions and not before.needs_old_versions:
        raise ConfigError(
            f"algorithm.proximal={algorithm.proximal.value}: needs what the versions that sampled computed, which a "
            f"run with algorithm.proximal={before.proximal.value} has not recorded"
        )


def replay_folder(run: Run, changes: Sequence[str]) -> Path:
    """Return the folder of a replay, in that of the run. Example: runs/x/replays/algorithm.loss-gspo, without the `=`
    that commands take for a key."""
    name = re.sub(r"[^\w.+-]+", "-", "-".join(changes)).strip("-.")
    if len(name) > MOST_NAME_CHARS:  # its end may be all in which it differs from another replay's
        name = f"{name[:MOST_NAME_CHARS]}-{sha256(name.encode()).hexdigest()[:8]}"
    return run.folder / REPLAYS / (name or EXACT)


def begin(folder: Path, run: Run, changes: Sequence[str]) -> None:
    """Empty the folder, of an earlier replay, and write the config. The caller has locked it."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK_FILE:
            path.unlink()
    config = OmegaConf.merge(run.config(), OmegaConf.from_dotlist(list(changes)))
    write_atomically(folder / CONFIG_FILE, OmegaConf.to_yaml(config).encode())


def end(folder: Path, outcome: dict[str, Any], changes: Sequence[str]) -> None:
    """Write summary.json."""
    summary = outcome | {"changes": list(changes), "meaning": REPLAY if changes else "the run as it was"}
    write_atomically(folder / SUMMARY_FILE, (json.dumps(summary, indent=2) + "\n").encode())


def evaluate(folder: Path, step: int) -> float:
    """Evaluate the checkpoint of a replay on one replica, as `slipstream evaluate` does, and log the accuracy.

    Raises:
        RunError: it failed.
    """
    run_dir = folder / "evaluation"
    words = [str(folder), "rollout.num_replicas=1", f"hydra.run.dir={run_dir}"]
    # Without a deadline of its own: the command keeps those of the config for each of its waits.
    done = subprocess.run(
        [sys.executable, "-m", "scripts.evaluate", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr or done.stdout).strip().rpartition("\n")[2]
        raise RunError(f"evaluate=true: the evaluation failed: {last}")
    report = json.loads((run_dir / "evaluation.json").read_bytes())
    accuracy = fmean(fmean(prompt["accuracies"]) for prompt in report["prompts"])
    JsonlSink(folder / METRICS_FILE).log(step, {ACCURACY: accuracy})
    return accuracy
