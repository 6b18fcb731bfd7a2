"""Fit a profile to what runs of a kind have recorded: their events, the metrics of their steps, their configs."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from configs.checkpoint import CONFIG_FILE, UnreadableConfigError
from scripts.observe.files import RunError
from scripts.observe.run import Run
from scripts.observe.view import RunView, TurnView
from scripts.predict.engine_times import fit_engine, list_turns, training
from scripts.predict.intervals import nonnegative, slowed, union
from scripts.simulate.profile import PredictError, Profile
from scripts.simulate.quantiles import Quantiles, alike_in_groups
from scripts.simulate.setup import Setup
from scripts.simulate.simulate import simulate
from trainer.tracking.sinks import METRICS_FILE

ENOUGH_SPREAD = 0.3
"""The difference between the shares of steps with generation beside them that tells what it costs the trainer."""
NONE = Quantiles((0.0,))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """The part of a run folder that tells how long things take."""

    config: Mapping[str, Any]
    steps: tuple[Mapping[str, float], ...]
    """The metrics of the steps, in order."""
    view: RunView
    evaluation_requests: int
    """Held-out prompts times samples; 0 if nothing was evaluated."""


def read_run(run_dir: Path) -> MeasuredRun:
    """Read a run folder. Raises PredictError if there is nothing in it to learn from."""
    from omegaconf import OmegaConf

    if not (run_dir / METRICS_FILE).is_file():
        raise PredictError(f"run={run_dir}: has no {METRICS_FILE}; give the folder of a run, such as runs/latest")
    try:
        run = Run.open(run_dir)
        metrics = run.metrics()
        config: Any = OmegaConf.to_container(run.config())
    except UnreadableConfigError as error:
        raise PredictError(f"run={run_dir}: no {CONFIG_FILE} that can be read: {error}") from error
    except (RunError, ValueError) as error:
        raise PredictError(f"run={run_dir}: {error}") from error
    steps = {int(record["step"]): record for record in metrics if "timing_s/step" in record}
    if not steps:
        raise PredictError(f"run={run_dir}: no step is in its {METRICS_FILE} yet")
    view = RunView()
    for stamped in run.valid_events():
        view.add(stamped)
    if not any(trajectory.turns for group in view.groups.values() for trajectory in group.trajectories.values()):
        raise PredictError(f"run={run_dir}: its events have no turns; train with trainer.events=true")
    prompts = [int(record["eval/num_prompts"]) for record in metrics if "eval/num_prompts" in record]
    return MeasuredRun(
        config=config,
        steps=tuple(steps[number] for number in sorted(steps)),
        view=view,
        evaluation_requests=prompts[-1] * int(config["evaluation"]["samples"]) if prompts else 0,
    )


def fit(runs: Sequence[MeasuredRun]) -> Profile:
    """Return what runs of the same model and task on the same machine tell together.

    One in which trainer and replicas never rest leaves open what each takes by itself; a synchronous one beside it
    tells.

    Raises:
        PredictError: the runs have too little to tell.
    """
    rollout, assumed = runs[0].config["rollout"], list[str]()
    has_tools = rollout["agent_loop"] != "single_turn" or bool(rollout.get("agent") or rollout.get("agent_command"))
    views = [run.view for run in runs]
    engine, trainer = fit_engine(views), _fit_trainer(runs)
    if engine is None or engine.step_s + engine.step_s_per_request <= 0:
        raise PredictError("run: its events do not say how long tokens take")
    # All who share cores are slowed alike.
    slowdowns = [times.slowdown for times in (engine, trainer) if times.slowdown > 1.0]
    slowdown = _mean(slowdowns) if slowdowns else 1.0
    if slowdown > 1.0:  # fitted again with the slowdown that engine and trainer agree on
        engine, trainer = fit_engine(views, slowdown) or engine, _fit_trainer(runs, slowdown)
    if not engine.is_spread:
        assumed.append(f"batches of all sizes take as measured around {engine.batch:.0f} requests, the only size seen")
    if any((run.config.get("data") or {}).get("sources") for run in runs):
        assumed.append("the sources (data.sources) are one, with groups of algorithm.group_size and all their episodes")
    cores, engine_cores = _cores(slowdown, runs, assumed)
    assumed.append("the KV cache is large enough for max_num_seqs requests")
    assumed.append("n ranks train a batch in 1/n of the time that depends on its tokens")
    return Profile(
        step_s=engine.step_s,
        step_s_per_request=engine.step_s_per_request,
        prefill_s_per_token=engine.prefill_s_per_token,
        has_tools=has_tools,
        cores=cores,
        engine_cores=engine_cores,
        train_s=trainer.train_s,
        train_s_per_token=trainer.train_s_per_token,
        computed_per_sampled=trainer.computed_per_sampled,
        evaluation_requests=max(run.evaluation_requests for run in runs),
        **_fit_episodes(views, has_tools),
        **_fit_updates(runs),
        assumed=tuple(assumed),
    )


# -- the trainer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerTimes:
    """The times of the trainer, as in `Profile`."""

    train_s: float
    train_s_per_token: float
    computed_per_sampled: float
    slowdown: float
    """The factor by which a step takes longer while replicas generate."""


def _fit_trainer(runs: Sequence[MeasuredRun], slowdown: float | None = None) -> TrainerTimes:
    """Fit the steps, with a slowdown that is known or else is found.

    The first step of a run is left out if there are enough others, because it warms up.
    """
    chosen = [run.steps[1:] if len(run.steps) > 4 else run.steps for run in runs]
    pairs = list(zip(runs, chosen, strict=True))
    steps = [step for some in chosen for step in some]
    ranks = np.array([int(run.config["trainer"]["num_ranks"]) for run, some in pairs for _ in some])
    seconds = np.array([step["perf/trainer_busy_s"] for step in steps])
    computed = np.array([step["perf/padded_tokens"] for step in steps])
    columns = np.stack([np.ones(len(steps)), computed / ranks], axis=1)
    beside = [_share_with_generation(run, [int(step["step"]) for step in some]) for run, some in pairs]
    known = [shares for shares in beside if shares is not None]
    shares = np.concatenate(known) if len(known) == len(runs) else np.ones(len(steps))
    if slowdown is None and np.ptp(shares) >= ENOUGH_SPREAD and len(steps) > 5:
        (base, per_token), factor = slowed(columns, seconds, shares)
    else:
        factor = slowdown or 1.0
        base, per_token = nonnegative(columns * (1 + (factor - 1) * shares)[:, None], seconds)[0]
    sampled = sum(len(some) * _sampled_per_step(run) for run, some in pairs)
    return TrainerTimes(
        train_s=float(base),
        train_s_per_token=float(per_token),
        computed_per_sampled=float(computed.sum()) / sampled if sampled else 1.0,
        slowdown=factor,
    )


def _share_with_generation(run: MeasuredRun, steps: Sequence[int]) -> Any:
    """Return the share of each step's training in which a replica generates, [n]; None if a step has no events."""
    turns = list_turns(run.view)
    busy = union([turn.start for turn in turns], [turn.end or turn.start for turn in turns])
    spans = {
        number: span
        for number, step in run.view.steps.items()
        for name, span in step.parts
        if name == "train" and span.end is not None
    }
    if any(step not in spans for step in steps):
        return None
    return busy.mean([spans[step].start for step in steps], [spans[step].end for step in steps])


def _sampled_per_step(run: MeasuredRun) -> float:
    per_step = int(run.config["algorithm"]["group_size"]) * int(run.config["trainer"]["prompts_per_step"])
    return per_step * _mean([sum(turn.num_tokens for turn in turns) for _, turns in _episodes(run.view)])


# -- what engine and trainer share -------------------------------------------------------------------------------------


def _cores(slowdown: float, runs: Sequence[MeasuredRun], assumed: list[str]) -> tuple[float, float]:
    """Return the cores of which trainer and replicas together need `slowdown` times as many as there are, and those of
    an engine."""
    if slowdown == 1.0:
        return 0.0, 1.0
    ranks = _mean([run.config["trainer"]["num_ranks"] for run in runs])
    replicas = _mean([run.config["rollout"]["num_replicas"] for run in runs])
    cores = float(os.cpu_count() or 1)
    assumed.append(f"the runs had {cores:g} cores, as this machine has (profile.cores), and a rank keeps one busy")
    return cores, max(0.0, (slowdown * cores - ranks) / replicas)


# -- episodes ----------------------------------------------------------------------------------------------------------


def _episodes(view: RunView) -> list[tuple[int, list[TurnView]]]:
    """Return (ordinal, turns) of every complete training trajectory. A turn that was tried again counts once."""
    episodes: list[tuple[int, list[TurnView]]] = []
    for group in view.groups.values():
        for trajectory in group.trajectories.values() if group.ready is not None else ():
            latest = {turn.turn: turn for turn in trajectory.turns if turn.end is not None}
            if latest and len(latest) == len({turn.turn for turn in trajectory.turns}):
                episodes.append((group.ordinal, [latest[number] for number in sorted(latest)]))
    return episodes


def _fit_episodes(views: Sequence[RunView], has_tools: bool) -> dict[str, Any]:
    lengths: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    episodes: list[list[TurnView]] = []
    for number, view in enumerate(views):
        for ordinal, turns in _episodes(view):
            lengths[number, ordinal].append(sum(turn.num_tokens for turn in turns))
            episodes.append(turns)
    if not episodes:
        raise PredictError("run: no group is complete in its events")
    turns = [turn for some in episodes for turn in some]
    dispatch, reward = [], []
    for run_view, group in ((each, group) for each in views for group in each.groups.values()):
        if group.claimed is None or group.ready is None:
            continue
        trajectories = group.trajectories.values()
        starts = [trajectory.turns[0].start for trajectory in trajectories if trajectory.turns]
        ends = [
            trajectory.episode_span.end
            for trajectory in trajectories
            if trajectory.episode_span and trajectory.episode_span.end is not None
        ]
        if starts and ends and run_view.is_whole(min(group.claimed, *starts, *ends), group.ready):
            dispatch.append(min(starts) - group.claimed)
            reward.append(group.ready - max(ends))
    return {
        "turns": Quantiles.of([len(some) for some in episodes]),
        "turn_tokens": Quantiles.of([turn.num_tokens for turn in turns]),
        "alike": alike_in_groups(list(lengths.values())),
        "uncached_tokens": _quantiles([turn.prompt_tokens - turn.cached_tokens for turn in turns]),
        "tool_s": _quantiles([gap for view in views for gap in _gaps(view)]) if has_tools else NONE,
        "reward_s": _quantiles(reward),
        "dispatch_s": max(0.0, median(dispatch)) if dispatch else 0.0,
    }


def _gaps(view: RunView) -> list[float]:
    """Return the seconds between two turns of an episode, and after its last one."""
    gaps: list[float] = []
    for group in view.groups.values():
        for trajectory in group.trajectories.values():
            turns = sorted(trajectory.turns, key=lambda turn: turn.turn)
            starts = [turn.start for turn in turns[1:]]
            if trajectory.episode_span is not None and trajectory.episode_span.end is not None:
                starts.append(trajectory.episode_span.end)
            ends = [turn.end for turn in turns]
            pairs = [(end, start) for end, start in zip(ends, starts, strict=False) if end is not None]
            gaps += [start - end for end, start in pairs if view.is_whole(end, start)]
    return gaps


# -- updates, checkpoints, the driver ----------------------------------------------------------------------------------


def _fit_updates(runs: Sequence[MeasuredRun]) -> dict[str, Any]:
    """Return the medians over all runs."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        for name, values in _measure_updates(run).items():
            seconds[name] += values
    return {name: max(0.0, float(median(values))) if values else 0.0 for name, values in seconds.items()}


def _measure_updates(run: MeasuredRun) -> dict[str, list[float]]:
    view = run.view
    busy = {int(step["step"]): step["perf/trainer_busy_s"] for step in run.steps}
    updates = [update for replica_updates in view.updates.values() for update in replica_updates.values()]
    staged: defaultdict[int, list[float]] = defaultdict(list)
    for update in updates:
        if update.stage_started is not None:
            staged[update.global_steps].append(update.stage_started)
    driver: list[float] = []
    checkpoints: list[float] = []
    for number, step in view.steps.items():
        parts = [(name, span.end - span.start) for name, span in step.parts if span.end is not None]
        checkpoints += [seconds for name, seconds in parts if name == "checkpoint"]
        if number in busy and len(parts) == len(step.parts):
            driver.append(sum(s for name, s in parts if name in ("assemble", "score", "train")) - busy[number])
    return {
        "publish_s": [
            min(staged[number]) - step.update.start
            for number, step in view.steps.items()
            if step.update and staged[number]
        ],
        "stage_s": [
            update.stage_ended - update.stage_started
            for update in updates
            if update.stage_started and update.stage_ended
        ],
        "swap_s": [update.resumed - update.frozen for update in updates if update.frozen and update.resumed],
        "driver_s": driver,
        "checkpoint_s": checkpoints,
    }


def measured_rate(run: MeasuredRun) -> float:
    """Return the samples per second of all steps but the first. A step after which the run was resumed takes as long
    as it counted itself, not until the next one began."""
    steps = {number: step for number, step in run.view.steps.items() if step.start is not None}
    counted = {int(step["step"]): step["timing_s/step"] for step in run.steps}
    ends = [step.update.end for step in steps.values() if step.update and step.update.end]
    starts = sorted((step.start or 0.0, number) for number, step in steps.items())
    borders = [*(start for start, _ in starts), max([*ends, *training(run.view)[1]])]
    seconds = [
        end - start if run.view.is_whole(start, end) else counted.get(number, 0.0)
        for (start, number), end in zip(starts, borders[1:], strict=True)
    ]
    return Setup.from_mapping(run.config).rate_after_first(seconds)


def simulated_rate(profile: Profile, run: MeasuredRun) -> float:
    """Return what `measured_rate` is of a simulation of the run's own steps."""
    setup = replace(Setup.from_mapping(run.config), steps=len(run.steps))
    return simulate(profile, setup, whole=True).rate_after_first


def _quantiles(values: Sequence[float]) -> Quantiles:
    return Quantiles.of([max(0.0, value) for value in values]) if values else NONE


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
