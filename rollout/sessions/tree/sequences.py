"""Sequences to train, made of a tree of generations: every sampled token is in exactly one of them."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollout.chat.verification import Cause
from rollout.sessions.tree.generation import Delivery, Generation, State
from rollout.types import EMPTY, Completion, TokenSequence, TurnReward


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStatistics:
    """Counts of how a session's generations became sequences."""

    num_sequences: int
    num_children: int
    """Trained generations that go on with a conversation: they have a parent, or begin a sequence for a cause."""
    num_merged: int
    """Trained generations that go on from the tokens of their parent, in one sequence."""
    sampled_tokens: int
    """Tokens of all generations, cancelled ones too."""
    delivered_tokens: int
    """Sampled tokens that are in a sequence."""
    forks: Mapping[Cause, int]
    """Sequences that begin where they do because of a cause."""
    bridged: Mapping[Cause, int]
    """Differences in the middle of sequences, which went on from the sampled tokens nevertheless."""
    num_repeated: int
    """Requests that were answered from the record, or that joined a running one."""
    num_undelivered: int
    """Answers that no client read to the end."""
    reread_tokens: int
    """Prompt tokens of the sequences that begin because of a cause. Most of them the policy has read before."""

    @property
    def merged_fraction(self) -> float:
        """The share of children that are merged; 1 where there are none."""
        return self.num_merged / self.num_children if self.num_children else 1.0

    @property
    def delivered_fraction(self) -> float:
        """The share of sampled tokens that are in a sequence; 1 where nothing was sampled."""
        return self.delivered_tokens / self.sampled_tokens if self.sampled_tokens else 1.0


def trained_generations(generations: Sequence[Generation]) -> list[Generation]:
    """Return the finished generations that sampled something. An answer that nobody read is left out where another
    call with the same content was answered too: its client gave up and asked again."""
    finished = [generation for generation in generations if generation.state is State.finished]
    calls: defaultdict[tuple[int | None, str], set[int]] = defaultdict(set)
    for generation in finished:
        calls[generation.parent, generation.digest].add(generation.call)
    return [
        generation
        for generation in finished
        if generation.completion.num_tokens
        and (generation.delivery is not Delivery.lost or len(calls[generation.parent, generation.digest]) == 1)
    ]


def rows(generations: Sequence[Generation]) -> list[list[Generation]]:
    """Return the trained generations of every sequence, each generation once, with the sequences in the order in which
    they began.

    Leaves are visited in the order of their creation, and each takes all generations on its path that no leaf before
    it has taken.
    """
    trained = {generation.number: generation for generation in trained_generations(generations)}
    before = {number: _previous(generation, generations, trained) for number, generation in trained.items()}
    inner = set(before.values())
    free = set(trained)
    sequences = []
    for leaf in sorted(trained.keys() - inner):
        row: list[Generation] = []
        number: int | None = leaf
        while number in free:
            free.remove(number)
            row.insert(0, trained[number])
            number = before[number]
        sequences.append(row)
    return sorted(sequences, key=lambda row: row[0].number)


def _previous(
    generation: Generation, generations: Sequence[Generation], trained: Mapping[int, Generation]
) -> int | None:
    """Return the trained generation whose tokens `generation` goes on from. Generations without tokens may lie
    between them."""
    while generation.continues and generation.parent is not None:
        if generation.parent in trained:
            return generation.parent
        generation = generations[generation.parent]
    return None


def to_sequence(row: Sequence[Generation], rewards: Mapping[int, float], rewarded: Sequence[int]) -> TokenSequence:
    """Return the sequence of generations that each go on from the one before.

    Its prompt is all that precedes the first completion. Tokens between two completions are observations: mask False,
    logprob 0 and no version.

    Args:
        rewards: by number of the generation; where the session has any, every generation is a turn.
        rewarded: the calls of those generations, ascending.
    """
    parts, masks, turn_rewards = [EMPTY], [np.empty(0, np.bool_)], []
    length = start = len(row[0].prompt_ids)
    for generation in row:
        observed = Completion.unsampled(generation.prompt_ids[length:])
        sampled = generation.completion
        parts += [observed, sampled]
        masks += [np.zeros(observed.num_tokens, np.bool_), np.ones(sampled.num_tokens, np.bool_)]
        length += observed.num_tokens + sampled.num_tokens
        if rewards:
            earlier = bisect_left(rewarded, generation.call)
            turn_rewards.append(TurnReward(length - start, rewards.get(generation.number, 0.0), earlier))
    sequence = TokenSequence.of((), Completion.concatenate(parts), np.concatenate(masks))
    return replace(sequence, prompt_ids=row[0].prompt_ids, turn_rewards=tuple(turn_rewards))


def statistics(generations: Sequence[Generation], num_repeated: int) -> SessionStatistics:
    sequences = rows(generations)
    trained = {generation.number: generation for row in sequences for generation in row}
    children = [
        generation
        for generation in trained.values()
        if generation.parent is not None or generation.cause not in (None, Cause.retry)
    ]
    return SessionStatistics(
        num_sequences=len(sequences),
        num_children=len(children),
        num_merged=sum(_previous(child, generations, trained) is not None for child in children),
        sampled_tokens=sum(generation.completion.num_tokens for generation in generations),
        delivered_tokens=sum(generation.completion.num_tokens for generation in trained.values()),
        forks=Counter(row[0].cause for row in sequences if row[0].cause is not None),
        bridged=Counter(
            generation.cause for row in sequences for generation in row[1:] if generation.cause is not None
        ),
        num_repeated=num_repeated,
        num_undelivered=sum(
            generation.state is State.finished and generation.delivery is Delivery.lost for generation in generations
        ),
        reread_tokens=sum(len(row[0].prompt_ids) for row in sequences if row[0].cause is not None),
    )
