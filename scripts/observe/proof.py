"""Hold the records of a run against the chain that it wrote while it trained (`trainer.tracking.proof` has the format).

Nothing here is shared with the writer: it digested what was trained, and this reads what is in the files.
"""

import hashlib
import json
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scripts.observe.files import slices
from trainer.checkpoint.store import CheckpointError, verified
from trainer.tracking.trajectories import TrajectoryRecord, recorded_routes

PROOF = "proof.jsonl"
CERTIFICATE = "certificate.json"
SUMMARY = "summary.json"
_LINE = re.compile(rb'(\{.*),"link":"([0-9a-f]{64})"\}\n')
_DIGESTED = {
    "tokens": "token ids or loss mask",
    "logprobs": "rollout logprobs",
    "versions": "versions",
    "outcome": "reward or texts",
    "training": "advantages, trainer logprobs or clips",
}
_TRAINED = (("trainer_logprobs", "<f4"), ("token_advantages", "<f4"), ("is_clipped", "u1"), ("is_rejected", "u1"))
"""Arrays over the loss tokens, with the types that are digested."""
Trajectory = tuple[int, int]
"""The ordinal of its prompt, and its place in the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofReport:
    """The state of the chain."""

    steps: int
    """The steps that have a line which is whole and follows the one before it."""
    link: str
    """The last link. It stands for all that the run has trained: kept elsewhere, it shows whether a folder is still the
    same."""
    weights: str
    """The digest of the weights after the last step."""
    certified: bool
    """True if certificate.json has this link."""


class Proof:
    """The chain of a run folder, read.

    Example:
        proof = Proof(run_dir)
        proof.findings()                              # of the chain itself, and of the certificate
        proof.findings_of(12, records, arrays)        # of the records of step 12
    """

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._problems: list[str] = []
        self._steps: dict[int, dict[str, Any]] = {}
        self._written: dict[int, dict[Trajectory, dict[str, str]]] = {}
        self._links: dict[int, str] = {}
        self._link, self._weights, self._last, self._unproven_until = "", "", 0, 0
        try:
            lines = (run_dir / PROOF).read_bytes().splitlines(keepends=True)
        except OSError as error:
            self._problems.append(f"{PROOF} cannot be read, so nothing proves what was trained: {error}")
            lines = []
        for number, line in enumerate(lines, 1):
            self._problems += (f"{PROOF}: line {number} {what}" for what in self._read(number, line))

    # -- the chain -----------------------------------------------------------------------------------------------------

    def _read(self, number: int, line: bytes) -> Iterator[str]:
        """Take a line. Yield what is wrong with it."""
        parts = _LINE.fullmatch(line)
        if parts is None:
            yield "is cut or damaged"
            return
        content, link = parts[1], parts[2].decode()
        if hashlib.sha256(content).hexdigest() != link:
            yield "is not what was written: its link differs"
        try:
            entry = json.loads(content + b"}")
            steps, previous, begins = int(entry["global_steps"]), entry["previous"], entry["kind"] == "beginning"
            weights = entry["origin"]["weights"] if begins else entry["weights"]
            continues = begins and bool(entry["origin"]["continues"])
            trajectories = {} if begins else {(line["ordinal"], line["index"]): line for line in entry["trajectories"]}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            yield f"is damaged: {error!r}"
            return
        is_first = number == 1 and (continues or not previous)
        if not is_first and previous != self._link:
            yield f"(step {steps}) does not follow the line before it"
        if number == 1 and not previous:  # a run of an older version, which this one goes on with
            self._unproven_until = steps if begins else 0
        if begins and not is_first and (steps, weights) != (self._last, self._weights):
            yield f"begins at step {steps} with other weights than those after step {self._last}"
        if not begins:
            if steps != self._last + 1 and number > 1:
                yield f"is of step {steps}, and comes after step {self._last}"
            self._steps[steps], self._links[steps], self._written[steps] = entry, link, trajectories
        self._link, self._weights, self._last = link, weights, steps

    def findings(self, first: int, last: int, *, has_ended: bool) -> Iterator[str]:
        """Yield what is wrong with the chain of the steps from `first` to `last`, and with the certificate."""
        yield from self._problems
        proven = range(max(first, self._unproven_until + 1), last + 1)
        if missing := [step for step in proven if step not in self._steps]:
            yield f"{PROOF} has no line of {len(missing)} step(s), the first: {missing[0]}"
        if beyond := [step for step in self._steps if step > last + (not has_ended)]:
            yield f"{PROOF} has lines of steps that were not taken, the first: {beyond[0]}"
        if (self._run_dir / CERTIFICATE).exists():
            yield from self._against_certificate()
        elif has_ended:
            yield f"{CERTIFICATE} is missing"

    def report(self) -> ProofReport:
        certified = self._certificate() or {}
        return ProofReport(
            steps=len(self._steps),
            link=self._link,
            weights=self._weights,
            certified=certified.get("link") == self._link,
        )

    # -- the records of a step -----------------------------------------------------------------------------------------

    def findings_of(
        self, step: int, records: Sequence[TrajectoryRecord], arrays: Mapping[str, Any] | None
    ) -> Iterator[str]:
        """Yield each way in which a step's records differ from the records as they were written.

        Args:
            arrays: the content of the .npz; None where there is none, or it cannot be read.
        """
        if (entry := self._steps.get(step)) is None:
            return
        try:
            differences = list(self._differences(step, records, arrays))
        except (KeyError, IndexError, TypeError, ValueError, MemoryError, OverflowError) as error:
            differences = [f"its tokens cannot be read: {error!r}"]
        for kind, suffix in (("records", "jsonl"), ("tokens", "npz")):
            path = self._run_dir / "trajectories" / f"step_{step:06d}.{suffix}"
            if not differences and entry.get(kind) and path.exists() and _sha256(path) != entry[kind]:
                differences.append(f"{path.name} is not what was written")
        yield from (f"step {step}, {what}" for what in differences)

    def _differences(
        self, step: int, records: Sequence[TrajectoryRecord], arrays: Mapping[str, Any] | None
    ) -> Iterator[str]:
        """Yield which trajectories of a step differ from those that were trained, and in what."""
        written, there = self._written[step], [(record.ordinal, record.index) for record in records]
        if there != list(written):
            yield from _misplaced(list(written), there)
            return
        for (ordinal, index), digests in zip(there, _digests(records, arrays), strict=True):
            for kind, digest in digests.items():
                if digest != written[ordinal, index].get(kind):
                    yield f"prompt {ordinal}, trajectory {index}: other {_DIGESTED[kind]} than were trained"

    # -- the certificate and the checkpoints ---------------------------------------------------------------------------

    def _certificate(self) -> dict[str, Any] | None:
        """Return the content of the certificate; None if it is not there, or not what was written."""
        try:
            data = (self._run_dir / CERTIFICATE).read_bytes()
            content = json.loads(data)
        except (OSError, ValueError, RecursionError):
            return None
        return content if data == (json.dumps(content, indent=2) + "\n").encode() else None

    def _against_certificate(self) -> Iterator[str]:
        certificate = self._certificate() or {}
        try:
            claims = [certificate["global_steps"], certificate["link"], certificate["weights"]]
            files, summary = dict(certificate["files"]), certificate["summary"]
        except (TypeError, KeyError, ValueError):
            yield f"{CERTIFICATE} is damaged"
            return
        if claims != [self._last, self._link, self._weights]:
            yield (
                f"{CERTIFICATE} is for step {claims[0]} with the link {claims[1]}; {PROOF} ends at step {self._last} "
                f"with {self._link}"
            )
        if summary != self._summary_sha256():
            yield "summary.json is not what was certified"
        for name, sha256 in files.items():
            path = self._run_dir / name
            if not path.is_file():
                if not name.startswith("checkpoints/"):  # a person may remove them
                    yield f"{name} is missing, and was there when the run ended"
            elif _sha256(path) != sha256:
                yield f"{name} is not what it was when the run ended"

    def _summary_sha256(self) -> str | None:
        """Return the SHA-256 of the summary without the audit, which came later; None if there is no summary."""
        try:
            summary = json.loads((self._run_dir / SUMMARY).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError):
            return "damaged"
        if isinstance(summary, dict):
            summary.pop("audit", None)
        return hashlib.sha256(json.dumps(summary, indent=2).encode()).hexdigest()

    def findings_of_checkpoints(self) -> Iterator[str]:
        """Read every checkpoint, and yield what is wrong with it."""
        for marker in sorted((self._run_dir / "checkpoints").glob("step_*/COMPLETE.json")):
            folder = marker.parent
            try:
                checkpoint = verified(folder)
                state = json.loads((folder / "recorder.bin").read_bytes())
                link = state.get("link", "")
            except (CheckpointError, OSError, ValueError, AttributeError) as error:
                yield f"checkpoints/{folder.name}: {error}"
                continue
            expected = self._links.get(checkpoint.global_steps)
            if expected is not None and link != expected:
                yield f"checkpoints/{folder.name} was saved by another run: its link is not that of the step"


def _misplaced(written: list[Trajectory], there: list[Trajectory]) -> Iterator[str]:
    """Yield which trajectories are not where they were written."""
    counts = Counter(there)
    differing = [name for name in written if counts[name] != 1] + [name for name in counts if name not in set(written)]
    for ordinal, index in dict.fromkeys(differing):
        number = counts[ordinal, index]
        what = "is missing" if number == 0 else "was not trained" if number == 1 else f"is there {number} times"
        yield f"prompt {ordinal}, trajectory {index} {what}"
    if not differing:
        place = next(place for place, pair in enumerate(zip(written, there, strict=True)) if pair[0] != pair[1])
        yield f"line {place + 1}: the trajectories are in another order than they were trained in"


def _digests(records: Sequence[TrajectoryRecord], arrays: Mapping[str, Any] | None) -> Iterator[dict[str, str]]:
    """Yield the digests of every trajectory, by kind: without the arrays only that of the outcome."""
    sampled = iter(()) if arrays is None else _array_digests(arrays)
    for record in records:
        numbers = struct.pack("<dd", record.reward, record.overlong_penalty)
        texts = [record.prompt, record.response, record.ground_truth, record.error or "", record.finish_reason]
        outcome = numbers + b"".join(text.encode("utf-8", "surrogatepass") + b"\0" for text in texts)
        yield {"outcome": _blake2b(outcome), **next(sampled, {})}


def _array_digests(arrays: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    prompts, responses = slices(arrays["prompt_lengths"]), slices(arrays["response_lengths"])
    starts = [0, *(response.stop for response in responses)]  # the last is the end, for a trajectory without a sequence
    mask = arrays["loss_mask"].astype(np.uint8)
    num_loss = [0, *np.cumsum(mask, dtype=np.int64).tolist()]
    counts = arrays.get("kept_counts", np.zeros(0)).astype("<i4")
    kept_ids = arrays.get("kept_ids", np.zeros(0)).astype("<i4")
    num_kept = [0, *np.cumsum(np.maximum(counts, 0), dtype=np.int64).tolist()]
    routed = recorded_routes(arrays)
    sequence = 0
    for place, num_sequences in enumerate(arrays["num_sequences"].tolist()):
        tokens = b""
        for own in range(sequence, sequence + num_sequences):
            prompt, response = prompts[own], responses[own]
            tokens += struct.pack("<ii", prompt.stop - prompt.start, response.stop - response.start)
            tokens += arrays["prompt_ids"][prompt].astype("<i4").tobytes()
            tokens += arrays["response_ids"][response].astype("<i4").tobytes() + mask[response].tobytes()
        whole = slice(starts[sequence], starts[sequence + num_sequences])
        loss = slice(num_loss[whole.start], num_loss[whole.stop])
        logprobs = arrays["rollout_logprobs"][whole].astype("<f4").tobytes()
        if counts[whole].any():
            kept = slice(num_kept[whole.start], num_kept[whole.stop])
            logprobs += counts[whole].tobytes() + kept_ids[kept].tobytes()
        for own in routed[sequence : sequence + num_sequences]:
            logprobs += b"".join(part.tobytes() for part in own.parts())
        training = arrays["advantages"][place : place + 1].astype("<f4").tobytes()
        for name, kind in _TRAINED:
            training += arrays[name][loss].astype(kind).tobytes() if name in arrays else b""
        yield {
            "tokens": _blake2b(tokens),
            "logprobs": _blake2b(logprobs),
            "versions": _blake2b(arrays["versions"][whole].astype("<i4").tobytes()),
            "training": _blake2b(training),
        }
        sequence += num_sequences


def _blake2b(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
