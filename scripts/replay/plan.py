"""Decide what a replay takes again: the steps with their configs, and the weights that it starts from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.checkpoint import CHECKPOINTS, EXPORTED_MODEL, INITIAL_MODEL, is_checkpoint
from configs.load import load_saved
from configs.schema import Config, ModelKind
from scripts.observe.files import RunError, parse_objects
from scripts.observe.recorded_groups import require_tokens
from scripts.observe.run import Run
from trainer.checkpoint.store import Checkpoint, CheckpointError, CheckpointStore, verified
from trainer.tracking.proof import PROOF_FILE

COMPUTES = ("torch", "transformers")
"""The packages whose versions decide the bits of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSpan:
    """Steps that were taken under one config."""

    first: int
    last: int
    config: Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The part of proof.jsonl that a replay is held against."""

    weights: Mapping[int, str]
    """The digest of the weights after each step; of the first one before it, too."""
    origins: Sequence[tuple[int, Mapping[str, Any]]]
    """The step that each process went on from, with the `Origin` that it wrote."""

    @classmethod
    def of(cls, run: Run) -> "Chain":
        """Read the chain of a run. It is empty if there is no file. Raise OSError."""
        path = run.folder / PROOF_FILE
        lines, _ = parse_objects(path.read_bytes().split(b"\n") if path.is_file() else [])
        weights, origins = dict[int, str](), list[tuple[int, Mapping[str, Any]]]()
        for line in lines:  # a later line of the same step is that of a process that took it again
            if line.get("kind") == "beginning":
                origins.append((line["global_steps"], line["origin"]))
                weights.setdefault(line["global_steps"], line["origin"]["weights"])
            else:
                weights[line["global_steps"]] = line["weights"]
        return cls(weights=weights, origins=origins)

    def origin_of(self, step: int) -> Mapping[str, Any]:
        """Return the origin of the process that took the step; empty if it wrote none."""
        return next((origin for began, origin in reversed(self.origins) if began < step), {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """The steps of a replay."""

    run: Run
    model: str
    """The policy before the first step: its folder or hub name."""
    checkpoint: Checkpoint | None
    """The checkpoint that the replay starts from; None: the model itself."""
    first: int
    """The first step whose outcome is told. Those between the start and it are taken as well."""
    spans: Sequence[ConfigSpan]
    chain: Chain

    @property
    def start(self) -> int:
        """The steps before the first one that is taken."""
        return self.spans[0].first - 1

    @property
    def last(self) -> int:
        return self.spans[-1].last

    @property
    def config(self) -> Config:
        """The config of the last step."""
        return self.spans[-1].config

    def changed(self, overrides: Sequence[str]) -> list[ConfigSpan]:
        """Return the spans with other values of the config. Raises ConfigError for some that cannot work."""
        files = self.run.config_files()
        return [replace(span, config=_config_of(files, span.first, overrides)) for span in self.spans]


def make_plan(run: Run, *, first: int | None, last: int | None, checkpoint: Path | None) -> ReplayPlan:
    """Plan the replay of the steps `first` to `last`, or of all that were recorded.

    Args:
        checkpoint: where it starts; None: the newest checkpoint before `first`, or the first policy.

    Raises:
        RunError: steps, model or checkpoint are not there.
        ConfigError: the run's config cannot work in this version.
    """
    steps = run.steps()
    if not steps:
        reason = "a supervised run, whose steps its files and config say, or one without a step"
        raise RunError(f"{run.folder}: holds no records of steps to take again: {reason}")
    start = None if checkpoint is None else _good(checkpoint)
    if first is None:
        first = steps[0] if start is None else start.global_steps + 1
    last = steps[-1] if last is None else last
    if not steps[0] <= first <= last <= steps[-1]:
        raise RunError(f"steps={first}:{last}: must lie within the recorded steps, {steps[0]}:{steps[-1]}")
    files = run.config_files()
    if start is None:
        start = _checkpoint_before(run, first, steps[0])
    if start is not None and start.global_steps >= first:
        raise RunError(f"from={start.path}: is of step {start.global_steps}, and step {first} comes before it")
    begin = 1 if start is None else start.global_steps + 1
    if missing := sorted(set(range(begin, last + 1)) - set(steps)):
        raise RunError(f"{run.folder.name}: step {missing[0]} has no records, and all from {begin} on are needed")
    for step in range(begin, last + 1):
        require_tokens(run, step)
    spans = _spans(files, begin, last)
    model = _initial_model(run, spans[0].config)
    return ReplayPlan(run=run, model=model, checkpoint=start, first=first, spans=spans, chain=Chain.of(run))


def _spans(files: Sequence[tuple[int, Path]], first: int, last: int) -> list[ConfigSpan]:
    spans: list[ConfigSpan] = []
    for step in range(first, last + 1):
        if spans and all(began != step - 1 for began, _ in files):
            spans[-1] = replace(spans[-1], last=step)
            continue
        config = _config_of(files, step)
        if spans and spans[-1].config == config:
            spans[-1] = replace(spans[-1], last=step)
        else:
            spans.append(ConfigSpan(first=step, last=step, config=config))
    return spans


def _config_of(files: Sequence[tuple[int, Path]], step: int, overrides: Sequence[str] = ()) -> Config:
    """Return the config of the process that took the step: the last one that began before it. What says where a run
    goes on from, and shows it, is left out."""
    path = next(path for began, path in reversed(files) if began < step)
    config = load_saved(path, overrides)
    return replace(config, resume="never", dashboard=False, plain_console=False)


def _good(path: Path) -> Checkpoint:
    try:
        return verified(path)
    except CheckpointError as error:
        raise RunError(f"from={path}: {error}") from error


def _checkpoint_before(run: Run, step: int, recorded_from: int) -> Checkpoint | None:
    """Return the newest good checkpoint before the step, or None to start from the first policy."""
    if step == 1:
        return None
    own = CheckpointStore(run.folder / CHECKPOINTS).folder
    paths = [own / f"step_{number:06d}" for number in range(step - 1, recorded_from - 2, -1)]
    paths = [path for path in paths if path.is_dir()]
    came = run.config().get("resume")
    if recorded_from > 1:  # where the checkpoint may be that the run's folder went on from
        continued = Path(str(came)).expanduser()
        paths += [continued / CHECKPOINTS / f"step_{recorded_from - 1:06d}", continued]
    for path in paths:
        try:
            return verified(path)
        except CheckpointError:
            continue
    if recorded_from > 1:
        raise RunError(
            f"{run.folder.name} goes on from step {recorded_from - 1} of {came}, whose checkpoint is not there any "
            f"more; from=CHECKPOINT names another"
        )
    return None


def _initial_model(run: Run, config: Config) -> str:
    names = [INITIAL_MODEL, EXPORTED_MODEL]
    if config.model.kind is ModelKind.tiny and config.model.warmup_steps == 0:
        names.append("untrained_model")
    for name in names:
        if (run.folder / name).is_dir():
            return str(run.folder / name)
    path = config.model.path
    if config.model.kind is ModelKind.tiny or path is None or is_checkpoint(Path(path).expanduser()):
        raise RunError(f"{run.folder.name}: the policy before its first step is not in it ({', '.join(names)})")
    return path


def differences(origin: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Name what differs between two `Origin`s, of that on which the bits of a sum may depend."""
    reasons = [
        f"{name} {origin[name]}, here {here[name]}"
        for name in ("device", "num_ranks", "num_threads")
        if name in origin and origin[name] != here[name]
    ]
    software, ours = origin.get("software", {}), here["software"]
    names = [name for name in COMPUTES if name in software and software[name] != ours.get(name)]
    return reasons + [f"{name} {software[name]}, here {ours.get(name)}" for name in names]


def parse_steps(text: str) -> tuple[int | None, int | None]:
    """Return the first and the last step of A:B, A: or :B. Raises RunError."""
    first, colon, last = text.partition(":")
    if not colon or not all(part == "" or part.isdecimal() for part in (first, last)):
        raise RunError(f"steps={text}: must be A:B, the first and the last step, such as 1:20, 41: or :20")
    return (int(first) if first else None), (int(last) if last else None)
