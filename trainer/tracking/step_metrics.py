"""Compute the metrics of the trajectory groups of one step: rewards, lengths, staleness."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rollout.types import UNKNOWN, FloatArray, TokenSequence, Trajectory, TrajectoryGroup, staleness
from trainer.tokens import join


def group_metrics(
    groups: Sequence[TrajectoryGroup], advantages: Sequence[FloatArray], global_steps: int, interval: int
) -> dict[str, float]:
    """Return the metrics of the groups that step `global_steps` trains. `interval`: weight_sync.interval."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    scored = [trajectory for trajectory in trajectories if trajectory.is_scored]
    rewards = np.array([trajectory.shaped_reward for trajectory in scored] or [0.0])
    scores = np.array([trajectory.reward for trajectory in scored] or [0.0])
    sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
    response_lengths = np.array([trajectory.num_tokens for trajectory in trajectories])
    prompt_lengths = np.array([len(sequence.prompt_ids) for sequence in sequences] or [0])
    flat_advantages = np.concatenate(list(advantages))
    score_s = [group.trajectories[0].score_s for group in groups if group.is_taught]
    solved = [{trajectory.reward for trajectory in group.trajectories if trajectory.is_scored} for group in groups]
    return {
        "critic/score/mean": float(scores.mean()),
        "critic/rewards/mean": float(rewards.mean()),
        "critic/rewards/max": float(rewards.max()),
        "critic/rewards/min": float(rewards.min()),
        "critic/advantages/mean": float(flat_advantages.mean()),
        "critic/advantages/max": float(flat_advantages.max()),
        "critic/advantages/min": float(flat_advantages.min()),
        "rollout/zero_variance_groups": float(np.mean([not np.any(a) for a in advantages])),
        "rollout/solve_all": float(np.mean([outcomes == {1.0} for outcomes in solved])),
        "rollout/solve_none": float(np.mean([outcomes == {0.0} for outcomes in solved])),
        "response_length/mean": float(response_lengths.mean()),
        "response_length/max": float(response_lengths.max()),
        "response_length/clip_ratio": float(np.mean([t.finish_reason == "length" for t in trajectories])),
        "prompt_length/mean": float(prompt_lengths.mean()),
        "rollout/prefix_cached_tokens": float(np.mean([t.cached_tokens for t in trajectories])),
        "perf/tokens": float(response_lengths.sum() + prompt_lengths.sum()),
        **({"teacher/score_s": float(np.mean(score_s))} if score_s else {}),
        **_kept_metrics(sequences),
        **_route_metrics(sequences),
        **_traffic_metrics(sequences),
        **{f"reward/{name}": mean for name, mean in _means([t.reward_metrics for t in trajectories])},
        **{f"agent/{name}": mean for name, mean in _means([t.agent_metrics for t in trajectories])},
        **_staleness_metrics(trajectories, global_steps, interval),
        **_source_metrics(groups, advantages, global_steps, interval),
    }


def _source_metrics(
    groups: Sequence[TrajectoryGroup], advantages: Sequence[FloatArray], global_steps: int, interval: int
) -> dict[str, float]:
    """Return the metrics of each source of data.sources; nothing where a run has no such."""
    metrics: dict[str, float] = {}
    for source in sorted({group.prompt.source for group in groups} - {""}):
        mine = [place for place, group in enumerate(groups) if group.prompt.source == source]
        trajectories = [trajectory for place in mine for trajectory in groups[place].trajectories]
        scores = [trajectory.reward for trajectory in trajectories if trajectory.is_scored]
        staleness_of = _staleness_metrics(trajectories, global_steps, interval)
        values = {
            "groups": len(mine),
            "score": np.mean(scores or [0.0]),
            "response_length": np.mean([trajectory.num_tokens for trajectory in trajectories]),
            "clip_ratio": np.mean([trajectory.finish_reason == "length" for trajectory in trajectories]),
            "zero_variance_groups": np.mean([not np.any(advantages[place]) for place in mine]),
            "staleness_mean": staleness_of["staleness/mean"],
            "staleness_max": staleness_of["staleness/max"],
        }
        metrics |= {f"sources/{source}/{name}": float(value) for name, value in values.items()}
    return metrics


def _kept_metrics(sequences: Sequence[TokenSequence]) -> dict[str, float]:
    """Return how much truncated sampling left, of the sampled tokens; nothing where none was truncated."""
    counts = [s.kept.counts[s.token_versions() >= 0] for s in sequences if s.kept is not None]
    if not counts:
        return {}
    joined = join(counts, np.int32)
    known = joined[joined > 0]
    return {
        "rollout/kept_tokens": float(known.mean()) if len(known) else 0.0,
        "rollout/kept_tokens_max": float(known.max(initial=0)),
        "rollout/unknown_kept": float(np.count_nonzero(joined == UNKNOWN)),
    }


def _route_metrics(sequences: Sequence[TokenSequence]) -> dict[str, float]:
    """Return how many inputs go to the experts that the sampler chose, and the size of what says so; nothing where no
    engine says."""
    routed = [part for sequence in sequences for part in sequence.routes_in_parts]
    if not routed:
        return {}
    num_inputs = sum(sequence.num_inputs for sequence in sequences)
    return {
        "rollout/routed_fraction": sum(int(routes.is_known.sum()) for routes in routed) / num_inputs,
        "rollout/route_megabytes": _num_bytes(map(_routes, sequences)) / 1e6,
    }


def _traffic_metrics(sequences: Sequence[TokenSequence]) -> dict[str, float]:
    """Return the bytes that agent workers send of each response token, and what of them are the tokens that sampling
    kept, and routes; nothing where there are neither."""
    kept, routes = _num_bytes(map(_kept, sequences)), _num_bytes(map(_routes, sequences))
    num_tokens = sum(len(sequence.response_ids) for sequence in sequences)
    if not kept + routes or not num_tokens:
        return {}
    total = _num_bytes(map(_plain, sequences)) + kept + routes
    metrics = {"traffic/bytes_per_token": total / num_tokens}
    if kept:
        metrics |= {"traffic/kept_bytes_per_token": kept / num_tokens, "traffic/kept_share": kept / total}
    if routes:
        metrics |= {"traffic/route_bytes_per_token": routes / num_tokens, "traffic/route_share": routes / total}
    return metrics


def _plain(sequence: TokenSequence) -> list[NDArray | None]:
    return [
        *(sequence.prompt_ids, sequence.response_ids, sequence.loss_mask),
        *(sequence.rollout_logprobs, sequence.teacher_logprobs),
    ]


def _kept(sequence: TokenSequence) -> list[NDArray | None]:
    return [] if sequence.kept is None else [sequence.kept.counts, sequence.kept.token_ids]


def _routes(sequence: TokenSequence) -> list[NDArray | None]:
    parts = (sequence.routes, sequence.prompt_routes)
    return [None if routes is None else routes.experts for routes in parts]


def _num_bytes(arrays: Iterable[Iterable[NDArray | None]]) -> int:
    """Return the size of arrays, each once: what several sequences share is one object, and travels as one."""
    distinct = {id(array): array.nbytes for some in arrays for array in some if array is not None}
    return sum(distinct.values())


def _means(metrics: Sequence[Mapping[str, float]]) -> list[tuple[str, float]]:
    """Return each name with its mean over the trajectories that have it."""
    names = {name for some in metrics for name in some}
    return [(name, float(np.mean([some[name] for some in metrics if name in some]))) for name in sorted(names)]


def _staleness_metrics(trajectories: Sequence[Trajectory], global_steps: int, interval: int) -> dict[str, float]:
    """Return the staleness of the tokens that are trained, 0 if there are none."""
    sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
    versions = join([sequence.token_versions()[sequence.loss_mask] for sequence in sequences], np.int32)
    values = staleness(versions, global_steps, interval) if len(versions) else np.zeros(1)
    return {
        "staleness/mean": float(values.mean()),
        "staleness/max": float(values.max()),
        "staleness/min": float(values.min()),
        "staleness/spanning_trajectories": float(np.mean([is_spanning(t) for t in trajectories])),
        "staleness/versions_per_trajectory_max": float(max(len(t.versions) for t in trajectories)),
    }


def is_spanning(trajectory: Trajectory) -> bool:
    """Return whether several versions sampled the trajectory's tokens."""
    return len(trajectory.versions) > 1
