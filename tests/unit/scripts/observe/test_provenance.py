"""Trained tokens are told from those that nobody sampled: histories of an episode, and every way to train something
else."""

import random
import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from rollout.request_ids import RequestId
from rollout.sampled_tokens import SampledPiece
from scripts.observe.provenance import TrainedSequence, Verdict, judge

PROMPT = [1, 2]


@dataclass
class Episode:
    """Samples answers, and remembers what was recorded of them.

    Token ids repeat often, so that pieces resemble each other. Logprobs are few as well.
    """

    chance: random.Random
    pieces: list[SampledPiece] = field(default_factory=list)
    version: int = 3

    def record(self, before: list[int], start: int, rows: list[tuple[int, float, int]]) -> None:
        self.pieces.append(
            SampledPiece(
                request_id=RequestId(ordinal=7, turn=len(self.pieces)),
                prompt_checksum=zlib.crc32(np.array(before, np.int32).tobytes()),
                start=start,
                token_ids=np.array([row[0] for row in rows], np.int32),
                logprobs=np.array([row[1] for row in rows], np.float32),
                spans=[(place, place + 1, row[2]) for place, row in enumerate(rows)],
            )
        )

    def sample(self, length: int) -> list[tuple[int, float, int]]:
        self.version += self.chance.random() < 0.2
        return [(self.chance.randrange(3), -self.chance.randrange(3) / 3, self.version) for _ in range(length)]

    def answer(self, before: list[int], length: int) -> list[tuple[int, float, int]]:
        """Sample an answer of so many tokens, maybe by several replicas, of which each but the last samples more
        than is known."""
        whole: list[tuple[int, float, int]] = []
        while len(whole) < length:
            rest = length - len(whole)
            known = rest if self.chance.random() < 0.5 else self.chance.randrange(rest + 1)
            rows = self.sample(known)
            lost = self.sample(self.chance.randrange(3)) if known < rest else []
            self.record(before, len(whole), rows + lost)
            whole += rows
        return whole


def sequence(prompt: list[int], turns: list[tuple[list[tuple[int, float, int]], bool]]) -> TrainedSequence:
    """`turns`: tokens, and whether they are an answer."""
    rows = [row for some, _ in turns for row in some]
    return TrainedSequence(
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array([row[0] for row in rows], np.int32),
        logprobs=np.array([row[1] for row in rows], np.float32),
        versions=np.array([row[2] for row in rows], np.int32),
        loss_mask=np.array([is_answer for some, is_answer in turns for _ in some], np.bool_),
    )


def random_trajectory(seed: int) -> tuple[list[TrainedSequence], Episode]:
    """Branches of turns: each goes on from a place where another has ended a turn, or begins anew. Observations may be
    empty, so that answers follow one another, and a prompt may be answered more than once."""
    chance = random.Random(seed)
    episode, ends, sequences = Episode(chance), [PROMPT], []
    for _ in range(chance.randrange(1, 4)):
        prompt = before = list(chance.choice(ends))
        turns: list[tuple[list[tuple[int, float, int]], bool]] = []
        for _ in range(chance.randrange(1, 4)):
            answer = episode.answer(before, chance.randrange(1, 9))
            observation = [(chance.randrange(3), 0.0, -1) for _ in range(chance.randrange(3))]
            turns += [(answer, True), (observation, False)]
            before = before + [row[0] for row in answer + observation]
            ends.append(before)
        sequences.append(sequence(prompt, turns))
    chance.shuffle(episode.pieces)
    return sequences, episode


def counts(sequences: list[TrainedSequence], pieces: list[SampledPiece]) -> dict[Verdict, int]:
    verdicts = np.concatenate(judge(sequences, pieces))
    return {kind: int((verdicts == kind).sum()) for kind in Verdict if (verdicts == kind).any()}


def answered(*lengths: int) -> tuple[TrainedSequence, Episode]:
    """Turns of these lengths with an observation after each."""
    episode, before = Episode(random.Random(0)), PROMPT
    turns: list[tuple[list[tuple[int, float, int]], bool]] = []
    for length in lengths:
        rows = [(10 * len(turns) + place, -0.5, 3) for place in range(length)]
        episode.record(before, 0, rows)
        turns += [(rows, True), ([(99, 0.0, -1)], False)]
        before = before + [row[0] for row in rows] + [99]
    return sequence(PROMPT, turns), episode


def test_whatever_is_put_together_of_answers_is_sampled() -> None:
    for seed in range(300):
        sequences, episode = random_trajectory(seed)
        assert set(counts(sequences, episode.pieces)) <= {Verdict.SAMPLED, Verdict.UNSAMPLED}, seed


@pytest.mark.parametrize("name", ["response_ids", "logprobs", "versions"])
def test_no_token_can_be_changed_unseen(name: str) -> None:
    """The others remain sampled, if maybe elsewhere. Of a logprob, the last bit counts."""
    for seed in range(300):
        sequences, episode = random_trajectory(seed)
        chance = random.Random(seed)
        number = chance.randrange(len(sequences))
        trained = sequences[number]
        place = chance.choice(np.flatnonzero(trained.loss_mask).tolist())
        values = vars(trained)[name].copy()
        values[place] = np.nextafter(values[place], np.float32(9)) if name == "logprobs" else values[place] + 50
        sequences[number] = replace(trained, **{name: values})
        verdicts = judge(sequences, episode.pieces)
        assert verdicts[number][place] == Verdict.NEVER, seed
        assert sum(int((verdict == Verdict.NEVER).sum()) for verdict in verdicts) == 1, seed


def test_a_branch_that_trains_the_shared_turn_again_trains_it_twice() -> None:
    trained, episode = answered(3, 2)
    assert counts([trained, trained], episode.pieces) == {Verdict.SAMPLED: 5, Verdict.TWICE: 5, Verdict.UNSAMPLED: 4}
    context = replace(trained, loss_mask=np.zeros(7, np.bool_))
    assert Verdict.TWICE not in counts([trained, context], episode.pieces), "it is not trained there"


def test_two_equal_answers_to_one_prompt_are_two() -> None:
    trained, episode = answered(3)
    assert Verdict.TWICE not in counts([trained, trained], [*episode.pieces, *episode.pieces])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_answer_that_begins_as_a_longer_one_to_the_same_prompt_leaves_that_its_tokens(
    order: tuple[int, int],
) -> None:
    episode, rows = Episode(random.Random(0)), [(5, -0.5, 3), (6, -0.5, 3), (7, -0.5, 3)]
    both = [rows, rows[:2]]
    for number in order:
        episode.record(PROMPT, 0, both[number])
    found = counts([sequence(PROMPT, [(both[number], True)]) for number in (1, 0)], episode.pieces)
    assert found == {Verdict.SAMPLED: 5}


def test_what_a_lost_replica_had_not_reported_is_no_part_of_the_answer() -> None:
    """[5 6 7] of which 5 was known; the other replica went on with [8 9]. Not trained may be [5 6 7] and then 8."""
    episode = Episode(random.Random(0))
    episode.record(PROMPT, 0, [(5, -0.5, 3), (6, -0.5, 3), (7, -0.5, 3)])
    episode.record(PROMPT, 1, [(8, -0.5, 4), (9, -0.5, 4)])

    def verdicts(*token_ids: int) -> list[int]:
        rows: Any = [(token_id, -0.5, 4 if token_id > 7 else 3) for token_id in token_ids]
        return judge([sequence(PROMPT, [(rows, True)])], episode.pieces)[0].tolist()

    assert verdicts(5, 8, 9) == [Verdict.SAMPLED] * 3
    assert verdicts(5, 6, 7) == [Verdict.SAMPLED] * 3
    assert verdicts(5, 6, 8) == [Verdict.SAMPLED] * 2 + [Verdict.ELSEWHERE]
    assert verdicts(8, 9)[0] == Verdict.ELSEWHERE


def test_a_token_that_is_trained_over_another_set_than_it_was_drawn_from_was_never_sampled_so() -> None:
    rows = [(5, -0.5, 3), (6, -0.25, 3)]
    episode = Episode(random.Random(0))
    episode.record(PROMPT, 0, rows)
    kept, other = np.array([11, 12], np.uint32), np.array([11, 13], np.uint32)
    pieces = [replace(piece, kept=kept) for piece in episode.pieces]
    trained = sequence(PROMPT, [(rows, True)])
    for claimed, second in ((kept, Verdict.SAMPLED), (other, Verdict.NEVER)):
        (verdict,) = judge([replace(trained, kept=claimed)], pieces)
        assert verdict.tolist() == [Verdict.SAMPLED, second]
    (verdict,) = judge([trained], pieces)
    assert verdict.tolist() == [Verdict.NEVER, Verdict.NEVER]
