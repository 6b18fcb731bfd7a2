"""A profile of what runs of a kind have recorded. Arithmetic only: `files.py` reads, `simulate.py` uses it."""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from scripts.predict.engine_times import EngineTimes, from_events, from_rows, training, turns_of
from scripts.predict.files import RunFiles
from scripts.predict.intervals import nonnegative, slowed, union
from scripts.predict.profile import PredictError, Profile
from scripts.predict.quantiles import Quantiles, alike_in_groups
from scripts.predict.setup import Setup
from trainer.tracking.events.view import RunView

ENOUGH_SPREAD = 0.3
"""Shares of steps with generation beside them must differ so much to tell what it costs the trainer."""
NONE = Quantiles((0.0,))


def fit(runs: Sequence[RunFiles]) -> Profile:
    """What runs of the same model and task on the same machine tell together. One in which trainer and replicas never
    rest leaves open what each takes by itself: a synchronous one beside it tells.

    Raises PredictError where they have too little to tell.
    """
    rollout, assumed = runs[0].config["rollout"], list[str]()
    has_tools = rollout["agent_loop"] != "single_turn" or bool(rollout.get("agent") or rollout.get("agent_command"))
    engine, trainer = _engine(runs, has_tools, assumed), _trainer(runs)
    slowdown = _slowdown(engine, trainer)
    if slowdown > 1.0 and (views := _views(runs)) is not None:
        engine, trainer = from_events(views, slowdown) or engine, _trainer(runs, slowdown)
    cores = _cores(slowdown, runs, assumed)
    assumed.append("the KV cache is large enough for max_num_seqs requests")
    assumed.append("n ranks train a batch in 1/n of the time that depends on its tokens")
    return Profile(
        step_s=engine.step_s,
        step_s_per_request=engine.step_s_per_request,
        prefill_s_per_token=engine.prefill_s_per_token,
        has_tools=has_tools,
        cores=cores.all,
        engine_cores=cores.of_engine,
        train_s=trainer.train_s,
        train_s_per_token=trainer.train_s_per_token,
        computed_per_sampled=trainer.computed_per_sampled,
        evaluation_requests=max(run.evaluation_requests for run in runs),
        **_episodes(runs, has_tools, assumed),
        **_updates(runs),
        assumed=tuple(assumed),
    )


def _views(runs: Sequence[RunFiles]) -> list[RunView] | None:
    """Of all runs; None where one has no events."""
    views = [run.view for run in runs if run.view is not None]
    return views if len(views) == len(runs) else None


def _engine(runs: Sequence[RunFiles], has_tools: bool, assumed: list[str]) -> EngineTimes:
    if (views := _views(runs)) is not None:
        found = from_events(views)
    else:
        assumed.append("no events: time of tools, queues and prompts is part of the time per token")
        rows = [row for run in runs for row in run.rows]
        found = from_rows(rows, max(run.config["rollout"]["max_num_seqs"] for run in runs), not has_tools)
    if found is None or found.step_s + found.step_s_per_request <= 0:
        raise PredictError("run: neither its events nor its trajectories say how long tokens take")
    if not found.is_spread:
        assumed.append(f"batches of all sizes take as measured around {found.batch:.0f} requests, the only size seen")
    return found


# -- the trainer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerTimes:
    train_s: float
    train_s_per_token: float
    """On one rank."""
    computed_per_sampled: float
    slowdown: float
    """So many times longer takes a step while replicas generate."""


def _trainer(runs: Sequence[RunFiles], slowdown: float | None = None) -> TrainerTimes:
    """With a known slowdown, or else it is found. A run's first step is left out if there are enough: it warms up."""
    chosen = [run.steps[1:] if len(run.steps) > 4 else run.steps for run in runs]
    pairs = list(zip(runs, chosen, strict=True))
    steps = [step for _, some in pairs for step in some]
    ranks = np.array([int(run.config["trainer"]["num_ranks"]) for run, some in pairs for _ in some])
    seconds = np.array([step["perf/trainer_busy_s"] for step in steps])
    computed = np.array([step["perf/padded_tokens"] for step in steps])
    columns = np.stack([np.ones(len(steps)), computed / ranks], axis=1)
    beside = [_beside(run, [int(step["step"]) for step in some]) for run, some in pairs]
    known = [one for one in beside if one is not None]
    shares = np.concatenate(known) if len(known) == len(runs) else np.ones(len(steps))
    if slowdown is None and np.ptp(shares) >= ENOUGH_SPREAD and len(steps) > 5:
        (base, per_token), factor = slowed(columns, seconds, shares)
    else:
        factor = slowdown or 1.0
        base, per_token = nonnegative(columns * (1 + (factor - 1) * shares)[:, None], seconds)[0]
    sampled = sum(_sampled(run, len(some)) for run, some in pairs)
    return TrainerTimes(
        train_s=float(base),
        train_s_per_token=float(per_token),
        computed_per_sampled=float(computed.sum()) / sampled if sampled else 1.0,
        slowdown=factor,
    )


# -- what they share ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cores:
    all: float
    of_engine: float


def _slowdown(engine: EngineTimes, trainer: TrainerTimes) -> float:
    """Who shares cores is slowed alike. It is the mean of what was found; 1 where nothing was."""
    found = [one for one in (engine.slowdown, trainer.slowdown) if one > 1.0]
    return _mean(found) if found else 1.0


def _cores(slowdown: float, runs: Sequence[RunFiles], assumed: list[str]) -> Cores:
    """Those for which trainer and replicas together ask so many times."""
    if slowdown == 1.0:
        return Cores(0.0, 1.0)
    ranks = _mean([run.config["trainer"]["num_ranks"] for run in runs])
    replicas = _mean([run.config["rollout"]["num_replicas"] for run in runs])
    cores = float(os.cpu_count() or 1)
    assumed.append(f"the runs had {cores:g} cores, as this machine has (profile.cores), and a rank keeps one busy")
    return Cores(cores, max(0.0, (slowdown * cores - ranks) / replicas))


def _beside(run: RunFiles, steps: Sequence[int]) -> Any:
    """[n] of each step's training, the share with a replica that generates; None if nobody knows."""
    if run.view is None:
        of_step = {
            int(step["step"]): 1 - step["perf/replica_idle"] for step in run.steps if "perf/replica_idle" in step
        }
        return np.array([of_step[step] for step in steps]) if all(step in of_step for step in steps) else None
    turns = turns_of(run.view)
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


def _sampled(run: RunFiles, num_steps: int) -> float:
    """Tokens that the policy sampled for so many steps."""
    per_step = int(run.config["algorithm"]["group_size"]) * int(run.config["trainer"]["prompts_per_step"])
    return num_steps * per_step * _mean([sum(turns) for turns in _turn_tokens(run)])


# -- episodes ----------------------------------------------------------------------------------------------------------


def _turn_tokens(run: RunFiles) -> list[tuple[int, ...]]:
    """By trajectory and turn."""
    if run.rows or run.view is None:
        return [row.turns for row in run.rows]
    return [tuple(turn.num_tokens for turn in one) for _, one in _turns(run.view)]


def _turns(view: RunView) -> list[tuple[int, list[Any]]]:
    """(ordinal, complete turns) of every trajectory of the training that has ended."""
    return [
        (group.ordinal, sorted(one.turns, key=lambda turn: turn.turn))
        for group in view.groups.values()
        if group.ready is not None
        for one in group.trajectories.values()
        if one.turns and all(turn.end is not None for turn in one.turns)
    ]


def _episodes(runs: Sequence[RunFiles], has_tools: bool, assumed: list[str]) -> dict[str, Any]:
    tokens = [turns for run in runs for turns in _turn_tokens(run)]
    if not tokens:
        raise PredictError("run: no trajectory says how many tokens it has")
    by_prompt: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for number, run in enumerate(runs):
        ordinals = [row.ordinal for row in run.rows] or [ordinal for ordinal, _ in _turns(run.view or RunView())]
        for ordinal, some in zip(ordinals, _turn_tokens(run), strict=True):
            by_prompt[number, ordinal].append(sum(some))
    found: dict[str, Any] = {
        "turns": Quantiles.of([len(some) for some in tokens]),
        "turn_tokens": Quantiles.of([count for some in tokens for count in some]),
        "alike": alike_in_groups(list(by_prompt.values())),
    }
    if (views := _views(runs)) is None:
        assumed.append("no events: tools take no time of their own, and requests reach a replica at once")
        return found | {"reward_s": _quantiles([row.reward_s for run in runs for row in run.rows])}
    turns = [turn for view in views for _, some in _turns(view) for turn in some]
    dispatch, reward = [], []
    for group in (group for view in views for group in view.groups.values()):
        if group.claimed is None or group.ready is None:
            continue
        trajectories = group.trajectories.values()
        starts = [one.turns[0].start for one in trajectories if one.turns]
        ends = [one.episode_span.end for one in trajectories if one.episode_span and one.episode_span.end is not None]
        if starts and ends:
            dispatch.append(min(starts) - group.claimed)
            reward.append(group.ready - max(ends))
    return found | {
        "uncached_tokens": _quantiles([turn.prompt_tokens - turn.cached_tokens for turn in turns]),
        "tool_s": _quantiles([gap for view in views for gap in _gaps(view)]) if has_tools else NONE,
        "reward_s": _quantiles(reward),
        "dispatch_s": max(0.0, median(dispatch)) if dispatch else 0.0,
    }


def _gaps(view: RunView) -> list[float]:
    """Seconds between two turns of an episode, and after its last one."""
    gaps: list[float] = []
    for group in view.groups.values():
        for one in group.trajectories.values():
            turns = sorted(one.turns, key=lambda turn: turn.turn)
            starts = [turn.start for turn in turns[1:]]
            if one.episode_span is not None and one.episode_span.end is not None:
                starts.append(one.episode_span.end)
            gaps += [start - turn.end for turn, start in zip(turns, starts, strict=False) if turn.end is not None]
    return gaps


# -- updates, checkpoints, the driver ----------------------------------------------------------------------------------


def _updates(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Medians over all runs."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        for name, values in (_from_metrics(run) if run.view is None else _from_view(run, run.view)).items():
            found[name] += values
    return {name: _median(values) for name, values in found.items()}


def _from_metrics(run: RunFiles) -> dict[str, list[float]]:
    seconds = {
        f"{name}_s": [step[f"weight_sync/{name}_ms"] / 1e3 for step in run.steps if f"weight_sync/{name}_ms" in step]
        for name in ("publish", "stage", "swap")
    }
    parts = ("wait_batch", "update_weights", "checkpoint")
    rest = [
        step["timing_s/step"] - step["perf/trainer_busy_s"] - sum(step.get(f"timing_s/{part}", 0.0) for part in parts)
        for step in run.steps
    ]
    checkpoints = [step["timing_s/checkpoint"] for step in run.steps if "timing_s/checkpoint" in step]
    return {**seconds, "driver_s": rest, "checkpoint_s": checkpoints}


def _from_view(run: RunFiles, view: RunView) -> dict[str, list[float]]:
    busy = {int(step["step"]): step["perf/trainer_busy_s"] for step in run.steps}
    updates = [one for of_replica in view.updates.values() for one in of_replica.values()]
    staged: defaultdict[int, list[float]] = defaultdict(list)
    for one in updates:
        if one.stage_started is not None:
            staged[one.global_steps].append(one.stage_started)
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
        "stage_s": [one.stage_ended - one.stage_started for one in updates if one.stage_started and one.stage_ended],
        "swap_s": [one.resumed - one.frozen for one in updates if one.frozen and one.resumed],
        "driver_s": driver,
        "checkpoint_s": checkpoints,
    }


def measured_rate(run: RunFiles) -> float:
    """Samples per second of all steps but the first."""
    steps = [] if run.view is None else [step for step in run.view.steps.values() if step.start is not None]
    if steps and run.view is not None:
        ends = [step.update.end for step in steps if step.update and step.update.end]
        borders = [*sorted(step.start or 0.0 for step in steps), max([*ends, *training(run.view)[1]])]
        seconds = [end - start for start, end in zip(borders, borders[1:], strict=False)]
    else:
        seconds = [step["timing_s/step"] for step in run.steps]
    return Setup.of_mapping(run.config).rate_after_first(seconds)


def _quantiles(values: Sequence[float]) -> Quantiles:
    return Quantiles.of([max(0.0, value) for value in values]) if values else NONE


def _median(values: Iterable[float]) -> float:
    return max(0.0, float(median(found))) if (found := list(values)) else 0.0


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
