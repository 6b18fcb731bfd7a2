"""The state of the rollouts that a checkpoint keeps, so that no prompt is lost and none is trained twice.

It is captured between an optimizer step and the freeing of the slots that it was trained on. At that point every prompt
of the stream is in exactly one place: trained, ready, under way, given up, or still to come.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from configs.algorithm import OPTIMAL_BASELINE
from configs.schema import AlgorithmConfig
from rollout.curriculum.order import CurriculumState, OtherPromptsError
from rollout.mixture import PromptMixture, places_of
from rollout.progress import PartialCompletion, TokenRecord
from rollout.request_ids import InGroup
from rollout.rollouter import GroupUnderWay, Rollouter
from rollout.types import KeptTokens, Trajectory, TrajectoryGroup

ANY = AlgorithmConfig()
"""An algorithm that learns from any group."""


class LostPromptsError(ValueError):
    """The checkpoint does not account for every prompt, so that a resumed run would skip or repeat some."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnderWay:
    ordinal: int
    claimed_version: int
    failures: int
    partials: dict[InGroup, PartialCompletion]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ready:
    """A group that waits for the trainer. The stream gives its prompt back by the ordinal."""

    ordinal: int
    trajectories: tuple[Trajectory, ...]
    greedy: Trajectory | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourceState:
    """A source of data.sources."""

    group_size: int
    next_ordinal: int
    """Prompts that were handed out of it."""
    trained: int
    """Groups of it that were trained."""
    discarded: int
    """Groups of it that were filtered out, aborted, dropped or given up."""
    curriculum: CurriculumState | None = None
    """The state of the order of its rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutState:
    prompts_checksum: int
    group_size: int
    next_ordinal: int
    returned: tuple[int, ...]
    """Ordinals below `next_ordinal` that were given back to the stream."""
    under_way: tuple[UnderWay, ...]
    """In order of dispatch."""
    ready: tuple[Ready, ...]
    """In order of arrival."""
    failed_groups: tuple[int, ...]
    failed_rewards: int
    counters: dict[str, int]
    """Counters of the whole run, for its summary."""
    num_trained: int | None = None
    """Groups that were trained. None: the checkpoint is from before it was counted."""
    curriculum: CurriculumState | None = None
    """The state of the order of the rows. None: it is uniform, whose ordinals say it all."""
    sources: dict[str, SourceState] = field(default_factory=dict)
    """The sources of data.sources by name."""
    places: dict[int, tuple[str, int]] = field(default_factory=dict)
    """The source, and the place there, of each ordinal that is under way, ready or returned, with data.sources."""


def capture(rollouter: Rollouter) -> RolloutState:
    """Return the state now. The next await may change it."""
    stream, buffer = rollouter.stream, rollouter.buffer
    return RolloutState(
        prompts_checksum=stream.checksum,
        group_size=rollouter.group_size,
        next_ordinal=stream.ordinal,
        returned=tuple(stream.returned),
        under_way=tuple(
            UnderWay(
                ordinal=ordinal,
                claimed_version=group.slot.claimed_version,
                failures=group.failures,
                partials=group.partials(),
            )
            for ordinal, group in rollouter.under_way.items()
        ),
        ready=tuple(
            Ready(ordinal=group.prompt.ordinal, trajectories=group.trajectories, greedy=group.greedy)
            for group in buffer.ready
        ),
        failed_groups=tuple(buffer.failures.failed_groups),
        failed_rewards=buffer.failures.failed_rewards,
        counters={
            "dropped": buffer.ledger.num_dropped,
            "filtered": buffer.num_filtered,
            "aborted": buffer.num_aborted,
            **rollouter.counters,
        },
        num_trained=buffer.num_trained,
        curriculum=_captured_curriculum(rollouter),
        sources=_captured_sources(rollouter),
        places=_captured_places(rollouter),
    )


def _captured_curriculum(rollouter: Rollouter) -> CurriculumState | None:
    """Return the state of the order of the rows, where the run has one source."""
    stream = rollouter.stream
    if isinstance(stream, PromptMixture):
        return None
    ready = (group.prompt.ordinal for group in rollouter.buffer.ready)
    return stream.order.state({*rollouter.under_way, *stream.returned, *ready})


def _captured_sources(rollouter: Rollouter) -> dict[str, SourceState]:
    stream, buffer = rollouter.stream, rollouter.buffer
    if not isinstance(stream, PromptMixture):
        return {}
    orders = stream.order_states(_captured_places(rollouter).values())
    return {
        source: SourceState(
            group_size=rollouter.size_of(source),
            next_ordinal=ordinal,
            trained=buffer.trained[source],
            discarded=buffer.discarded[source],
            curriculum=orders[source],
        )
        for source, ordinal in stream.ordinals.items()
    }


def _captured_places(rollouter: Rollouter) -> dict[int, tuple[str, int]]:
    stream = rollouter.stream
    if not isinstance(stream, PromptMixture):
        return {}
    groups = [*rollouter.buffer.ready, *rollouter.under_way.values()]
    return places_of([*(group.prompt for group in groups), *map(stream.at, stream.returned)])


def restore(state: RolloutState, rollouter: Rollouter, algorithm: AlgorithmConfig = ANY) -> int:
    """Put the state into the new rollouter of a run that resumes after the checkpoint's steps.

    Returns how many groups do not fit, because rollout.max_staleness, algorithm.group_size or a weight of data.sources
    has changed, or because they lack what this run learns from: a teacher's scores, or what its advantage reads. The
    stream gives their prompts first. Raises OtherPromptsError and LostPromptsError.
    """
    stream, buffer = rollouter.stream, rollouter.buffer
    if stream.checksum != state.prompts_checksum:
        raise OtherPromptsError("the prompts of the checkpoint are not those of the data and the seed of this run")
    if isinstance(stream, PromptMixture):
        stream.resume({name: source.next_ordinal for name, source in state.sources.items()}, state.places)
        stream.restore_orders({name: source.curriculum for name, source in state.sources.items()})
    else:
        stream.order.restore(state.curriculum)
    returned: list[int] = []
    for ready in state.ready:
        group = TrajectoryGroup(prompt=stream.at(ready.ordinal), trajectories=ready.trajectories, greedy=ready.greedy)
        is_whole = _has_same_size(state, rollouter, group.prompt.source)
        is_whole = is_whole and (rollouter.teacher is None or group.is_taught)
        if not (is_whole and _has_what_is_read(group, algorithm) and buffer.adopt(group)):
            returned.append(ready.ordinal)
    for under_way in state.under_way:
        prompt = stream.at(under_way.ordinal)
        known = [partial.completion.kept for partial in under_way.partials.values()]
        fits = _has_same_size(state, rollouter, prompt.source) and _reads(known, algorithm)
        slot = buffer.ledger.adopt(under_way.claimed_version, prompt.source) if fits else None
        if slot is None:
            returned.append(under_way.ordinal)
        else:
            group = GroupUnderWay(
                ordinal=under_way.ordinal,
                slot=slot,
                prompt=prompt,
                records={key: TokenRecord.of(partial) for key, partial in under_way.partials.items()},
                failures=under_way.failures,
            )
            rollouter.register(group)
    stream.ordinal = state.next_ordinal
    stream.returned = sorted([*state.returned, *returned])
    buffer.failures.failed_groups = list(state.failed_groups)
    buffer.failures.failed_rewards = state.failed_rewards
    buffer.ledger.num_dropped, buffer.num_filtered = state.counters["dropped"], state.counters["filtered"]
    buffer.num_aborted = state.counters.get("aborted", 0)
    rollouter.counters = {name: state.counters[name] for name in rollouter.counters}
    _require_every_prompt_once(rollouter, state.num_trained)
    if isinstance(stream, PromptMixture):
        _require_every_prompt_of_each_source(stream, rollouter, state)
    return len(returned)


def _has_what_is_read(group: TrajectoryGroup, algorithm: AlgorithmConfig) -> bool:
    """Return whether a group has what algorithm.advantage computes from, which the run that sampled it may not have
    needed."""
    scored = [trajectory for trajectory in group.trajectories if trajectory.is_scored]
    if algorithm.advantage == "remax" and group.greedy is None:
        return False
    if algorithm.advantage == "maxrl" and any(trajectory.shaped_reward < 0 for trajectory in scored):
        return False
    if any(name not in trajectory.reward_metrics for trajectory in scored for name in algorithm.gdpo_weights):
        return False
    return _reads([sequence.kept for sequence in group.sequences], algorithm)


def _reads(kept: Iterable[KeptTokens | None], algorithm: AlgorithmConfig) -> bool:
    """Return whether algorithm.advantage can read tokens that were drawn from these."""
    return algorithm.advantage != OPTIMAL_BASELINE or all(each is None for each in kept)


def _has_same_size(state: RolloutState, rollouter: Rollouter, source: str) -> bool:
    """Return whether groups of the source have as many trajectories as in the run that is resumed."""
    before = state.sources[source].group_size if source else state.group_size
    return before == rollouter.size_of(source)


def _require_every_prompt_of_each_source(stream: PromptMixture, rollouter: Rollouter, state: RolloutState) -> None:
    """Check for each source what `_require_every_prompt_once` checks for all."""
    buffer = rollouter.buffer
    places = [place for ordinal, place in _captured_places(rollouter).items() if ordinal < stream.ordinal]
    for name, source in state.sources.items():
        buffer.trained[name], buffer.discarded[name] = source.trained, source.discarded
        mine = {own for of, own in places if of == name}
        if source.next_ordinal != len(mine) + source.trained + source.discarded:
            raise LostPromptsError(
                f"data.sources.{name}: the rollouts of the checkpoint account for {source.trained} trained prompts, "
                f"{source.discarded} discarded and {len(mine)} others, of {source.next_ordinal} that were handed out"
            )
    if sum(source.next_ordinal for source in state.sources.values()) != stream.ordinal:
        raise LostPromptsError(
            f"the sources of the checkpoint have handed out {stream.ordinals}, which are not {stream.ordinal} prompts"
        )


def _require_every_prompt_once(rollouter: Rollouter, num_trained: int | None) -> None:
    """Check that each prompt that the stream has handed out is trained, discarded or still in one place: a stream that
    goes on too late has skipped some, and one that goes on too early repeats some."""
    stream, buffer = rollouter.stream, rollouter.buffer
    ready = (group.prompt.ordinal for group in buffer.ready)
    known = {*ready, *rollouter.under_way, *stream.returned, *buffer.failures.failed_groups}
    discarded = buffer.num_filtered + buffer.num_aborted + buffer.ledger.num_dropped
    rest = stream.ordinal - len(known) - discarded
    buffer.num_trained = rest if num_trained is None else num_trained
    if rest != buffer.num_trained:
        raise LostPromptsError(
            f"the rollouts of the checkpoint account for {buffer.num_trained} trained prompts, {discarded} discarded "
            f"and {len(known)} others, and the stream would go on at prompt {stream.ordinal}: it would "
            f"{'skip' if rest > buffer.num_trained else 'repeat'} {abs(rest - buffer.num_trained)}"
        )


def encode(state: RolloutState) -> bytes:
    return msgspec.msgpack.encode(state, enc_hook=_Arrays().encode)


def decode(data: bytes) -> RolloutState:
    """Read a state. Raises ValueError when the bytes are none."""
    return msgspec.msgpack.decode(data, type=RolloutState, dec_hook=_Arrays().decode)


class _Arrays:
    """The arrays of a state, in the order in which they are written and read: one that is there again, such as the
    routes of a prompt in each sequence of its group, is written as its number and stays one object."""

    def __init__(self) -> None:
        self._written: dict[int, tuple[int, NDArray[Any]]] = {}  # which keeps each, so that no other has its id
        self._read: list[NDArray[Any]] = []

    def encode(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if id(value) in self._written:
                return self._written[id(value)][0]
            self._written[id(value)] = len(self._written), value
            shape = (value.shape,) if value.ndim > 1 else ()
            return value.dtype.str, value.tobytes(), *shape
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}: {value!r:.100}")

    def decode(self, _: type, value: Any) -> Any:
        if isinstance(value, int):
            return self._read[value]
        dtype, data, *shape = value
        self._read.append(np.frombuffer(data, dtype).reshape(*shape or [-1]))
        return self._read[-1]
