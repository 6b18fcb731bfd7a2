"""From a tree of generations to the sequences that are trained: every sampled token in exactly one of them."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rollout.sessions.generation import Cause, Delivery, Generation, State
from rollout.types import EMPTY, Completion, TokenSequence, TurnReward


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStatistics:
    """How a session's generations became sequences."""

    num_sequences: int
    num_children: int
    """Trained generations that have a parent, and how many of them go on from its tokens in one sequence."""
    num_merged: int
    sampled_tokens: int
    """By all generations, cancelled ones too, and how many of them are in a sequence."""
    delivered_tokens: int
    forks: Mapping[Cause, int]
    """Sequences that begin where they do because of a cause."""
    bridged: Mapping[Cause, int]
    """Differences in the middle of sequences, that went on from the sampled tokens nevertheless."""
    num_repeated: int
    """Requests that were answered from the record, or joined one that ran."""
    num_undelivered: int
    """Answers that no client read to the end."""

    @property
    def merged_fraction(self) -> float:
        """1 where no generation has a parent."""
        return self.num_merged / self.num_children if self.num_children else 1.0

    @property
    def delivered_fraction(self) -> float:
        """1 where nothing was sampled."""
        return self.delivered_tokens / self.sampled_tokens if self.sampled_tokens else 1.0


def trained(generations: Sequence[Generation]) -> list[Generation]:
    """The finished generations that sampled something, without those that nobody read and that were generated again
    for another request of the same content."""
    finished = [one for one in generations if one.state is State.finished]
    calls = {(one.parent, one.digest): set[int]() for one in finished}
    for one in finished:
        calls[one.parent, one.digest].add(one.call)
    return [
        one
        for one in finished
        if one.completion.num_tokens and not (one.delivery is Delivery.lost and len(calls[one.parent, one.digest]) > 1)
    ]


def rows(generations: Sequence[Generation]) -> list[list[Generation]]:
    """The trained generations of every sequence, each generation once: leaves in order of creation take all on their
    path that is not taken yet. The sequences are in the order in which they began."""
    kept = {one.number: one for one in trained(generations)}
    before = {number: _before(one, generations, kept) for number, one in kept.items()}
    inner = set(before.values())
    free = set(kept)
    found = []
    for leaf in sorted(kept.keys() - inner):
        row: list[Generation] = []
        number: int | None = leaf
        while number in free:
            free.remove(number)
            row.insert(0, kept[number])
            number = before[number]
        found.append(row)
    return sorted(found, key=lambda row: row[0].number)


def _before(one: Generation, generations: Sequence[Generation], kept: Mapping[int, Generation]) -> int | None:
    """The trained generation whose tokens `one` goes on from. Between them are only generations without tokens."""
    while one.continues and one.parent is not None:
        if one.parent in kept:
            return one.parent
        one = generations[one.parent]
    return None


def to_sequence(row: Sequence[Generation], rewards: Mapping[int, float], rewarded: Sequence[int]) -> TokenSequence:
    """The sequence of generations that each go on from the one before. Its prompt is all that precedes the first, and
    tokens between two completions are observations: mask False, logprob 0 and no version.

    Args:
        rewards: by number of the generation; where the session has any, every generation is a turn.
        rewarded: the calls of those generations, ascending.
    """
    parts, masks, turn_rewards = [EMPTY], [np.empty(0, np.bool_)], []
    length = len(row[0].prompt_ids)
    start = length
    for one in row:
        observed = _unsampled(one, length)
        parts += [observed, one.completion]
        masks += [np.zeros(observed.num_tokens, np.bool_), np.ones(one.completion.num_tokens, np.bool_)]
        length += observed.num_tokens + one.completion.num_tokens
        if rewards:
            turn_rewards.append(
                TurnReward(length - start, rewards.get(one.number, 0.0), bisect_left(rewarded, one.call))
            )
    return TokenSequence(
        prompt_ids=row[0].prompt_ids,
        response_ids=(whole := Completion.concatenate(parts)).token_ids,
        loss_mask=np.concatenate(masks),
        rollout_logprobs=whole.logprobs,
        spans=whole.spans,
        turn_rewards=tuple(turn_rewards),
    )


def _unsampled(one: Generation, start: int) -> Completion:
    """The tokens of its prompt from `start` on, that nobody sampled."""
    token_ids = one.prompt_ids[start:]
    logprobs = np.zeros(len(token_ids), np.float32)
    return Completion(token_ids=token_ids, logprobs=logprobs, spans=(), finish_reason="")


def statistics(generations: Sequence[Generation], num_repeated: int) -> SessionStatistics:
    found = rows(generations)
    inside = [one for row in found for one in row]
    later = [one for row in found for one in row[1:]]
    kept = {one.number: one for one in inside}
    children = [one for one in inside if one.parent is not None]
    return SessionStatistics(
        num_sequences=len(found),
        num_children=len(children),
        num_merged=sum(_before(one, generations, kept) is not None for one in children),
        sampled_tokens=sum(one.completion.num_tokens for one in generations),
        delivered_tokens=sum(one.completion.num_tokens for one in inside),
        forks=Counter(row[0].cause for row in found if row[0].cause is not None),
        bridged=Counter(one.cause for one in later if one.cause is not None),
        num_repeated=num_repeated,
        num_undelivered=sum(one.state is State.finished and one.delivery is Delivery.lost for one in generations),
    )
