"""A profile of what a run has recorded. Arithmetic only: `files.py` reads, `simulate.py` uses it."""

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
from trainer.tracking.events.view import RunView

ENOUGH_SPREAD = 0.3
"""Shares of steps with generation beside them must differ so much to tell what it costs the trainer."""
NONE = Quantiles((0.0,))


def fit(run: RunFiles) -> Profile:
    """Raises PredictError where the run has too little to tell."""
    rollout, assumed = run.config["rollout"], list[str]()
    has_tools = rollout["agent_loop"] != "single_turn" or bool(rollout.get("agent") or rollout.get("agent_command"))
    engine = _engine(run, has_tools, assumed)
    trainer = _trainer(run, engine, assumed)
    slows = trainer.slows_engine
    if slows > 1.0:
        assumed.append(f"a second replica slows a replica as training does, {slows:.2f} times: they share cores")
    assumed.append("the KV cache is large enough for max_num_seqs requests")
    assumed.append("n ranks train a batch in 1/n of the time that depends on its tokens")
    return Profile(
        step_s=engine.step_s,
        step_s_per_request=engine.step_s_per_request,
        prefill_s_per_token=engine.prefill_s_per_token,
        has_tools=has_tools,
        training_slows_engine=slows,
        engine_slows_engine=slows,
        engine_slows_training=trainer.slowed,
        train_s=trainer.train_s,
        train_s_per_token=trainer.train_s_per_token,
        computed_per_sampled=trainer.computed_per_sampled,
        evaluation_requests=run.evaluation_requests,
        **_episodes(run, has_tools, assumed),
        **_updates(run),
        assumed=tuple(assumed),
    )


def _engine(run: RunFiles, has_tools: bool, assumed: list[str]) -> EngineTimes:
    if run.view is not None:
        found = from_events(run.view)
    else:
        assumed.append("no events: time of tools, queues and prompts is part of the time per token")
        found = from_rows(run.rows, run.config["rollout"]["max_num_seqs"], not has_tools)
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
    slowed: float
    """`engine_slows_training`"""
    slows_engine: float
    """`training_slows_engine`"""


def _trainer(run: RunFiles, engine: EngineTimes, assumed: list[str]) -> TrainerTimes:
    """Of the steps, the first left out where there are enough: it warms up."""
    steps = run.steps[1:] if len(run.steps) > 4 else run.steps
    num_ranks = int(run.config["trainer"]["num_ranks"])
    seconds = np.array([step["perf/trainer_busy_s"] for step in steps])
    computed = np.array([step["perf/padded_tokens"] for step in steps])
    columns = np.stack([np.ones(len(steps)), computed / num_ranks], axis=1)
    shares = _beside(run, [int(step["step"]) for step in steps])
    factor, slows_engine = 1.0, engine.training_slows_engine
    if shares is not None and np.ptp(shares) >= ENOUGH_SPREAD and len(steps) > 5:
        (base, per_token), factor = slowed(columns, seconds, shares)
    else:
        factor = slows_engine
        if factor > 1.0:
            assumed.append(f"generation slows training as training slows generation, {factor:.2f} times")
        share = 1.0 if shares is None else float(shares.mean())
        base, per_token = nonnegative(columns * (1 + (factor - 1) * share), seconds)[0]
    if run.view is None and factor > 1.0:
        slows_engine = factor
        assumed.append(f"training slows generation as generation slows training, {factor:.2f} times")
    sampled = _sampled(run, [int(step["step"]) for step in steps])
    return TrainerTimes(
        train_s=float(base),
        train_s_per_token=float(per_token),
        computed_per_sampled=float(computed.sum()) / sampled if sampled else 1.0,
        slowed=factor,
        slows_engine=slows_engine,
    )


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


def _sampled(run: RunFiles, steps: Sequence[int]) -> float:
    """Tokens that the policy sampled for these steps."""
    per_step = int(run.config["algorithm"]["group_size"]) * int(run.config["trainer"]["prompts_per_step"])
    return len(steps) * per_step * _mean([sum(turns) for turns in _turn_tokens(run)])


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


def _episodes(run: RunFiles, has_tools: bool, assumed: list[str]) -> dict[str, Any]:
    tokens = _turn_tokens(run)
    if not tokens:
        raise PredictError("run: no trajectory says how many tokens it has")
    by_prompt: defaultdict[int, list[float]] = defaultdict(list)
    ordinals = [row.ordinal for row in run.rows] or [ordinal for ordinal, _ in _turns(run.view or RunView())]
    for ordinal, some in zip(ordinals, tokens, strict=True):
        by_prompt[ordinal].append(sum(some))
    found: dict[str, Any] = {
        "turns": Quantiles.of([len(some) for some in tokens]),
        "turn_tokens": Quantiles.of([count for some in tokens for count in some]),
        "alike": alike_in_groups(list(by_prompt.values())),
    }
    if run.view is None:
        assumed.append("no events: tools take no time of their own, and requests reach a replica at once")
        return found | {"reward_s": _quantiles([row.reward_s for row in run.rows])}
    groups = [group for group in run.view.groups.values() if group.claimed is not None and group.ready is not None]
    uncached = [turn.prompt_tokens - turn.cached_tokens for _, turns in _turns(run.view) for turn in turns]
    dispatch, reward = [], []
    for group in groups:
        trajectories = group.trajectories.values()
        starts = [one.turns[0].start for one in trajectories if one.turns]
        ends = [one.episode_span.end for one in trajectories if one.episode_span and one.episode_span.end is not None]
        if starts and ends:
            dispatch.append(min(starts) - (group.claimed or 0.0))
            reward.append((group.ready or 0.0) - max(ends))
    return found | {
        "uncached_tokens": _quantiles(uncached),
        "tool_s": _quantiles(_gaps(run.view)) if has_tools else NONE,
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


def _updates(run: RunFiles) -> dict[str, Any]:
    if run.view is None:
        ms = {name: [step[f"weight_sync/{name}_ms"] for step in run.steps if f"weight_sync/{name}_ms" in step]
              for name in ("publish", "stage", "swap")}  # fmt: skip
        parts = ("wait_batch", "update_weights", "checkpoint")
        rest = [
            step["timing_s/step"]
            - step["perf/trainer_busy_s"]
            - sum(step.get(f"timing_s/{part}", 0.0) for part in parts)
            for step in run.steps
        ]
        checkpoints = [step["timing_s/checkpoint"] for step in run.steps if "timing_s/checkpoint" in step]
        return {
            **{f"{name}_s": _median(values) / 1e3 for name, values in ms.items()},
            "driver_s": max(0.0, _median(rest)),
            "checkpoint_s": _median(checkpoints),
        }
    view = run.view
    busy = {int(step["step"]): step["perf/trainer_busy_s"] for step in run.steps}
    updates = [one for of_replica in view.updates.values() for one in of_replica.values()]
    staged: defaultdict[int, list[float]] = defaultdict(list)
    for one in updates:
        if one.stage_started is not None:
            staged[one.global_steps].append(one.stage_started)
    staging = [one.stage_ended - one.stage_started for one in updates if one.stage_started and one.stage_ended]
    paused = [one.resumed - one.frozen for one in updates if one.frozen and one.resumed]
    published = [
        min(staged[number]) - step.update.start for number, step in view.steps.items() if step.update and staged[number]
    ]
    driver: list[float] = []
    checkpoints: list[float] = []
    for number, step in view.steps.items():
        parts = [(name, span.end - span.start) for name, span in step.parts if span.end is not None]
        checkpoints += [seconds for name, seconds in parts if name == "checkpoint"]
        if number in busy and len(parts) == len(step.parts):
            driver.append(sum(s for name, s in parts if name in ("assemble", "score", "train")) - busy[number])
    return {
        "publish_s": _median(published),
        "stage_s": _median(staging),
        "swap_s": _median(paused),
        "driver_s": max(0.0, _median(driver)),
        "checkpoint_s": _median(checkpoints),
    }  # fmt: skip


def measured_seconds(run: RunFiles) -> float:
    """Of all its steps, from the first wait for a batch to the last record."""
    if run.view is not None and (spans := training(run.view))[0]:
        starts = [step.start for step in run.view.steps.values() if step.start is not None]
        ends = [step.update.end for step in run.view.steps.values() if step.update and step.update.end]
        return max([*ends, *spans[1]]) - min(starts)
    return sum(step["timing_s/step"] for step in run.steps)


def _quantiles(values: Sequence[float]) -> Quantiles:
    return Quantiles.of([max(0.0, value) for value in values]) if values else NONE


def _median(values: Iterable[float]) -> float:
    return max(0.0, float(median(found))) if (found := list(values)) else 0.0


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
