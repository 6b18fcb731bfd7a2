"""Several sources of prompts in one run: whose turn it is, and slots and prompts for each of them.

The ratio is one of *trained* groups. `Turns` deals the groups of the run out to the sources, by weight and whatever
they do; what falls into the first step is what the first step trains, and so on. So a source that is slow, or whose
groups are filtered out or fail, keeps its share: the trainer waits for it as for any slow group, within the bound of
staleness.
"""

import zlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count
from math import ceil, gcd, lcm

from configs.schema import StalePolicy
from rollout.curriculum.order import CurriculumState
from rollout.prompts import PromptStream
from rollout.staleness import Slot, SlotLedger, StalenessWindow
from rollout.types import Prompt, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTerms:
    """The terms on which the groups of a source are sampled."""

    sampling: SamplingParams
    group_size: int
    replayable: bool = True
    """True where episodes that run again from their beginning hear what was sampled for them before."""


class Turns:
    """Deals groups out to sources. Of the first n groups, a source with the share w gets n w, rounded down or up,
    for every n.

    This is the quota method of Balinski and Young (1975). Each group goes, of those sources that would not exceed their
    quota n w rounded up, to the one that is due first: the smallest (a + 1) / w, where a is what it has already. With
    whole weights the turns repeat themselves, because after as many groups as the weights add up to, each source has
    exactly its weight.

    Example: weights of 2 and 1 give the turns A A B, A A B, ...
    """

    def __init__(self, weights: Mapping[str, float]):
        """`weights`: above 0, in the order in which sources that are due alike take their turn."""
        shares = {name: Fraction(str(weight)) for name, weight in weights.items()}
        whole = lcm(*(share.denominator for share in shares.values()))
        numbers = {name: int(share * whole) for name, share in shares.items()}
        divisor = gcd(*numbers.values())
        self._weights = {name: number // divisor for name, number in numbers.items()}
        self._round = sum(self._weights.values())
        multiple = lcm(*self._weights.values())
        self._interval = {name: multiple // weight for name, weight in self._weights.items()}
        self._places: dict[str, list[int]] = {name: [] for name in weights}
        self._num_dealt = 0

    def share(self, source: str) -> Fraction:
        """Return the source's share of all groups."""
        return Fraction(self._weights[source], self._round)

    def groups(self, source: str, total: int) -> int:
        """Return how many of the first `total` groups are the source's."""
        rounds, rest = divmod(total, self._round)
        self._deal(rest)
        return rounds * self._weights[source] + bisect_left(self._places[source], rest)

    def place(self, source: str, number: int) -> int:
        """Return the place among all groups of the source's group `number`, counted from 0."""
        rounds, rest = divmod(number, self._weights[source])
        while len(self._places[source]) <= rest:
            self._deal(min(2 * self._num_dealt + 1, self._round))
        return rounds * self._round + self._places[source][rest]

    def _deal(self, total: int) -> None:
        """Deal out the first groups of a round, up to `total`."""
        for place in range(self._num_dealt, total):
            due = {
                name: (len(self._places[name]) + 1) * self._interval[name]
                for name, weight in self._weights.items()
                if len(self._places[name]) * self._round < (place + 1) * weight
            }
            self._places[min(due, key=lambda name: due[name])].append(place)
        self._num_dealt = max(self._num_dealt, total)


class MixedLedger:
    """The slots of all sources, with a `SlotLedger` for each. A batch is what all of them select together.

    Example:
        ledger = MixedLedger({"math": 2, "search": 1}, window, StalePolicy.wait, total_steps=10)
        slot = ledger.claim(ledger.turn)
        ledger.finish(slot, 0)
        ledger.select(0)   # None until both sources have what step 0 trains of them
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        window: StalenessWindow,
        policy: StalePolicy,
        total_steps: int,
        global_steps: int = 0,
    ):
        """
        Args:
            window: that of all sources together.
            global_steps: steps that were taken already.
        """
        self.window, self.policy, self.num_dropped = window, policy, 0
        self.total_groups = total_steps * window.groups_per_step
        self.turns = Turns(weights)
        ids = count()
        self._ledgers = {
            source: SlotLedger(
                (mine := self._window_of(source)), policy, mine.groups_before(total_steps), global_steps, source, ids
            )
            for source in weights
        }

    def _window_of(self, source: str) -> StalenessWindow:
        window, turns = self.window, self.turns
        return replace(
            window,
            groups_per_step=ceil(turns.share(source) * window.groups_per_step),
            quota=lambda steps: turns.groups(source, steps * window.groups_per_step),
        )

    @property
    def sources(self) -> Mapping[str, SlotLedger]:
        return self._ledgers

    @property
    def live_version(self) -> int:
        return next(iter(self._ledgers.values())).live_version

    @property
    def num_in_flight(self) -> int:
        return sum(ledger.num_in_flight for ledger in self._ledgers.values())

    @property
    def num_ready(self) -> int:
        return sum(ledger.num_ready for ledger in self._ledgers.values())

    @property
    def num_free(self) -> int:
        return sum(ledger.num_free for ledger in self._ledgers.values())

    @property
    def complete(self) -> bool:
        """Every group of the run has been selected for a batch."""
        return all(ledger.complete for ledger in self._ledgers.values())

    @property
    def turn(self) -> str | None:
        """Return the source whose turn it is to claim: of those that may, the one whose next group comes first. None:
        none may."""
        places = {
            source: self.turns.place(source, ledger.num_begun)
            for source, ledger in self._ledgers.items()
            if ledger.can_claim()
        }
        return min(places, key=lambda source: places[source]) if places else None

    def of(self, source: str) -> SlotLedger:
        """Return the ledger of a source."""
        return self._ledgers[source]

    def lacking(self, step: int) -> list[str]:
        """Return the names of the sources for which step `step` waits."""
        return [source for ledger in self._ledgers.values() for source in ledger.lacking(step)]

    def claim(self, source: str) -> Slot:
        """Take a free slot of the source: only where it `can_claim`."""
        return self._ledgers[source].claim()

    def adopt(self, version: int, source: str) -> Slot | None:
        """Return a slot for a group of the run that is resumed, as `SlotLedger.adopt` does."""
        return self._ledgers[source].adopt(version)

    def finish(self, slot: Slot, min_version: int) -> None:
        """Take note that the group of the slot is ready."""
        self._ledgers[slot.source].finish(slot, min_version)

    def give_back(self, slot: Slot) -> None:
        """Free the slot of a group that is not trained, for another prompt of its source."""
        self._ledgers[slot.source].give_back(slot)

    def drop_expired(self, step: int) -> list[int]:
        """Give back, under the `drop` policy, the slots of ready groups too stale for step `step`."""
        expired = [slot_id for ledger in self._ledgers.values() for slot_id in ledger.drop_expired(step)]
        self.num_dropped += len(expired)
        return expired

    def select(self, step: int) -> list[int] | None:
        """Take the slots that step `step` trains. Returns None, and takes none, while a source lacks some."""
        chosen = {source: ledger.choose(step) for source, ledger in self._ledgers.items()}
        whole = {source: some for source, some in chosen.items() if some is not None}
        if len(whole) < len(chosen):
            return None
        for source, some in whole.items():
            self._ledgers[source].take(some, step)
        return [slot_id for some in whole.values() for slot_id in some]

    def advance(self, global_steps: int) -> None:
        """Free the slots that weights tagged `global_steps`, which are live on every replica, were trained on."""
        for ledger in self._ledgers.values():
            ledger.advance(global_steps)


class PromptMixture:
    """The prompts of several sources under one numbering. An ordinal identifies a prompt in the run, and stands for one
    place in the stream of one source, whose every prompt comes once per epoch of its own.

    Which source an ordinal is of follows from the turns, and so from what was filtered out and failed before. It is
    written on the prompt, in the records, and in the checkpoint for all that are not over.

    Example:
        mixture = PromptMixture({"math": PromptStream(a, seed=0), "search": PromptStream(b, seed=0)})
        mixture.next("search")   # ordinal 0, source_ordinal 0
        mixture.next("math")     # ordinal 1, source_ordinal 0
    """

    def __init__(self, streams: Mapping[str, PromptStream]):
        self._streams = streams
        self._places: dict[int, tuple[str, int]] = {}
        self.ordinal = 0
        """The first ordinal that was never handed out."""
        self.returned: list[int] = []
        """Earlier ordinals, ascending, to hand out again before it, because their groups were lost."""
        text = "\n".join(f"{source}/{stream.checksum}" for source, stream in streams.items())
        self.checksum = zlib.crc32(text.encode())

    @property
    def ordinals(self) -> dict[str, int]:
        """Return how many prompts of each source were handed out."""
        return {source: stream.ordinal for source, stream in self._streams.items()}

    def resume(self, ordinals: Mapping[str, int], places: Mapping[int, tuple[str, int]]) -> None:
        """Go on after a checkpoint.

        Args:
            ordinals: how many prompts of each source were handed out.
            places: source and place there of every ordinal that `at` is asked for, or that is returned.
        """
        for source, ordinal in ordinals.items():
            self._streams[source].ordinal = ordinal
        self._places = dict(places)

    def order_states(self, live: Iterable[tuple[str, int]]) -> dict[str, CurriculumState | None]:
        """Return the state of each source's order of its rows. `live`: source and place there of what is not over."""
        mine = {source: set[int]() for source in self._streams}
        for source, own in live:
            mine[source].add(own)
        return {source: stream.order.state(mine[source]) for source, stream in self._streams.items()}

    def restore_orders(self, states: Mapping[str, CurriculumState | None]) -> None:
        """Go on from the states of a checkpoint. Raises OtherPromptsError for one of another order."""
        for source, state in states.items():
            self._streams[source].order.restore(state)

    def tell(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        """Tell the source of a prompt the rewards of its group."""
        self._streams[prompt.source].order.tell(prompt.source_ordinal, rewards)

    def gauges(self) -> dict[str, float]:
        """Return the metrics of the orders, by source."""
        return {
            f"sources/{source}/{name}": value
            for source, stream in self._streams.items()
            for name, value in stream.order.gauges().items()
        }

    def next(self, source: str) -> Prompt:
        """Hand out the source's smallest returned ordinal, else the next new one."""
        for ordinal in self.returned:
            if self._places[ordinal][0] == source:
                self.returned.remove(ordinal)
                return self.at(ordinal)
        self.ordinal += 1
        return self._named(self.ordinal - 1, source, self._streams[source].next())

    def at(self, ordinal: int) -> Prompt:
        """Look up a prompt that the checkpoint has named, without handing it out."""
        source, own = self._places[ordinal]
        return self._named(ordinal, source, self._streams[source].at(own))

    def _named(self, ordinal: int, source: str, prompt: Prompt) -> Prompt:
        return replace(prompt, ordinal=ordinal, source=source, source_ordinal=prompt.ordinal)


def places_of(prompts: Iterable[Prompt]) -> dict[int, tuple[str, int]]:
    """Return the source and the place there of each prompt, by its ordinal."""
    return {prompt.ordinal: (prompt.source, prompt.source_ordinal) for prompt in prompts}


def joined(parts: Sequence[tuple[str, Sequence[Prompt]]]) -> list[Prompt]:
    """Number the prompts of all sources one after another, for an evaluation that asks all of them."""
    every = [(source, prompt) for source, prompts in parts for prompt in prompts]
    return [
        replace(prompt, ordinal=ordinal, source=source, source_ordinal=prompt.ordinal)
        for ordinal, (source, prompt) in enumerate(every)
    ]
