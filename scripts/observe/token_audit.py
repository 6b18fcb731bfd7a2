"""Hold all trained tokens of a run against the record of what its replicas sampled."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollout.sampled_tokens import SAMPLED, SampledFile, SampledPiece
from scripts.observe.files import slices
from scripts.observe.provenance import TrainedSequence, Verdict, judge
from trainer.tracking.trajectories import recorded_kept

FINDINGS = {
    Verdict.NEVER: "tokens that no replica sampled were trained",
    Verdict.ELSEWHERE: "tokens were trained after others than those that they were sampled after",
    Verdict.TWICE: "sampled tokens were trained again in another place of their trajectory",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """The numbers of tokens. In a sound run, `never_sampled`, `misplaced` and `again` are 0."""

    sampled: int
    """The tokens that replicas sampled for training, including those for groups that were not trained, and those nobody
    used."""
    trained: int
    """Tokens in the loss."""
    never_sampled: int
    """Trained, or said to be of a version, and with this id, logprob and version sampled by nobody for the episode."""
    misplaced: int
    """Sampled for the episode, but after other tokens than in the sequence that is trained."""
    again: int
    """Trained in more than one place of a trajectory."""
    unchecked: int
    """The tokens that were not held against a record, because there is none of theirs."""
    delivered_fraction: float
    """Trained tokens by those sampled for the same trajectories. What a lost replica had not reported counts as
    sampled, too. 1 where nothing is recorded."""


class TokenAudit:
    """Holds the trained tokens of each step against the record.

    Example:
        tokens = TokenAudit(run_dir, unrecorded_until=0)
        tokens.take_step(12, arrays, [(17, 0), (17, 1)])
        tokens.counts(), tokens.findings()
    """

    def __init__(self, run_dir: Path, unrecorded_until: int):
        """Read the records of a run. Tokens of versions up to `unrecorded_until` may come from a process that recorded
        nothing here; 0 means that there is no such process."""
        self._unrecorded_until = unrecorded_until
        self._problems = list[str]()
        self._index: defaultdict[tuple[int, int], list[tuple[SampledFile, int, int]]] = defaultdict(list)
        self._counts: defaultdict[Verdict, int] = defaultdict(int)
        self._first: dict[Verdict, str] = {}
        self._sampled = self._sampled_for_trained = self._trained = self._unchecked = 0
        self._has_all = self._read(run_dir / SAMPLED)

    def _read(self, folder: Path) -> bool:
        """Read the records, and return whether that of every replica is here."""
        files = list[SampledFile]()
        for path in sorted(folder.glob("*.bin")):
            try:
                files.append(file := SampledFile(path))
            except OSError as error:
                self._problems.append(f"{SAMPLED}/{path.name} cannot be read: {error}")
                continue
            for ordinal, episode, num_tokens, place in file.pieces():
                self._index[ordinal, episode].append((file, place, num_tokens))
                self._sampled += num_tokens
            if file.problem is not None:
                self._problems.append(f"{SAMPLED}/{path.name}: {file.problem}")
        return bool(files) and not any(file.is_elsewhere for file in files)

    def skip(self, num_tokens: int) -> None:
        """Count trained tokens that are not recorded themselves."""
        self._trained += num_tokens
        self._unchecked += num_tokens

    def take_step(self, step: int, arrays: Mapping[str, Any], trajectories: Sequence[tuple[int, int]]) -> None:
        """Judge the tokens of a step.

        Args:
            arrays: the tokens, as `token_arrays` has written them.
            trajectories: the (ordinal, index) of each trajectory in it.

        Raises:
            OSError, ValueError, KeyError: something is wrong with the arrays.
        """
        for (ordinal, index), sequences in zip(trajectories, _trajectories(arrays), strict=True):
            recorded = self._index.get((ordinal, index), [])
            self._sampled_for_trained += sum(num_tokens for _, _, num_tokens in recorded)
            pieces: list[SampledPiece] = [file.piece(place) for file, place, _ in recorded]
            where = f"step {step}, prompt {ordinal}, trajectory {index}"
            for number, (sequence, verdict) in enumerate(zip(sequences, judge(sequences, pieces), strict=True)):
                self._trained += int(sequence.loss_mask.sum())
                self._take(f"{where}, sequence {number}", sequence, verdict)

    def _take(self, where: str, sequence: TrainedSequence, verdict: Any) -> None:
        for kind in FINDINGS:
            wrong = verdict == kind
            if kind is not Verdict.TWICE:
                may_lack = self._may_lack(sequence)
                self._unchecked += int((wrong & may_lack).sum())
                wrong &= ~may_lack
            if wrong.any():
                self._counts[kind] += int(wrong.sum())
                self._first.setdefault(kind, f"{where}, token {int(wrong.argmax())}")

    def _may_lack(self, sequence: TrainedSequence) -> Any:
        """Return which tokens may have been sampled by a replica whose record is not here."""
        if not self._has_all:
            return np.ones(len(sequence.versions), np.bool_)
        is_early = sequence.versions <= self._unrecorded_until
        return is_early & (sequence.versions >= 0) & (self._unrecorded_until > 0)

    def findings(self) -> Iterator[str]:
        yield from self._problems
        for kind, what in FINDINGS.items():
            if kind in self._first:
                yield f"{self._counts[kind]} {what}, the first: {self._first[kind]}"

    def counts(self) -> TokenCounts:
        checked = self._trained - self._unchecked
        return TokenCounts(
            sampled=self._sampled,
            trained=self._trained,
            never_sampled=self._counts[Verdict.NEVER],
            misplaced=self._counts[Verdict.ELSEWHERE],
            again=self._counts[Verdict.TWICE],
            unchecked=self._unchecked,
            delivered_fraction=round(checked / self._sampled_for_trained, 6) if self._sampled_for_trained else 1.0,
        )


def _trajectories(arrays: Mapping[str, Any]) -> Iterator[list[TrainedSequence]]:
    names = ("prompt_ids", "response_ids", "rollout_logprobs", "versions", "loss_mask")
    prompt_ids, response_ids, logprobs, versions, loss_mask = (arrays[name] for name in names)
    kept = recorded_kept(arrays)
    drawn_from = None if kept is None else kept.checksums()
    sequences = (
        TrainedSequence(
            prompt_ids=prompt_ids[prompt_slice],
            response_ids=response_ids[response_slice],
            logprobs=logprobs[response_slice],
            versions=versions[response_slice],
            loss_mask=loss_mask[response_slice],
            kept=None if drawn_from is None else drawn_from[response_slice],
        )
        for prompt_slice, response_slice in zip(
            slices(arrays["prompt_lengths"]), slices(arrays["response_lengths"]), strict=True
        )
    )
    for num_sequences in arrays["num_sequences"].tolist():
        yield [next(sequences) for _ in range(num_sequences)]
