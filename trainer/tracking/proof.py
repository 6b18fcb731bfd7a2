"""The chain that proves a run: proof.jsonl says of every step what was trained, and which weights came of it.

A line is a JSON object whose last key is its `link`: the SHA-256 of the bytes before it, which hold the link of the
line before. So no line can be changed, left out or exchanged without all later ones, and the last link stands for the
whole run. `scripts.observe.proof` reads the chain and holds the records against it, in code of its own.

Digests are BLAKE2b of 8 bytes, in hexadecimal digits. The bytes are those of little-endian arrays, and of texts in
UTF-8 with a zero byte after each.
"""

import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from configs.checkpoint import CHECKPOINTS, CONFIG_FILE, MARKER
from rollout.types import FloatArray, KeptTokens, Trajectory, TrajectoryGroup
from trainer.tokens import TrainedTokens
from trainer.tracking.sinks import METRICS_FILE, append_line, write_atomically
from weight_sync.protocol import WeightTag

PROOF_FILE = "proof.jsonl"
CERTIFICATE_FILE = "certificate.json"
LINK = b',"link":"'
"""The bytes between the content of a line and its link."""
CERTIFIED = (
    CONFIG_FILE,
    METRICS_FILE,
    PROOF_FILE,
    "bad_batches/*.npz",
    "discarded/*.jsonl",
    "evaluations/*.jsonl",
    "sampled/*.bin",
    f"{CHECKPOINTS}/*/{MARKER}",
)
"""The files of which a certificate has the SHA-256. The chain has those of trajectories/, and a checkpoint's marker
those of the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The origin of a process's weights, and what computes: on the same machine, with the same software and as many
    ranks and threads, the same batches give the same bits."""

    policy: str
    """The folder or name of the model that the train workers have loaded."""
    weights: str
    """The digest of the weights with which they begin (`trainer.worker.digest`)."""
    num_ranks: int
    num_threads: int
    """Threads of each rank."""
    device: str
    """The name of the GPU or of the processor."""
    software: Mapping[str, str]
    """Versions of packages, by name."""
    continues: str = ""
    """The checkpoint that was loaded, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """A line of proof.jsonl: a process begins to train."""

    kind: Literal["beginning"] = "beginning"
    previous: str
    """The link of the line before, if need be of another folder; empty at the very beginning."""
    global_steps: int
    config: str
    """SHA-256 of config.yaml; empty where there is none."""
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryProof:
    """Digests of a trajectory, each over all of its sequences, one after the other."""

    ordinal: int
    index: int
    tokens: str
    """Numbers of prompt and response tokens, their ids (int32) and the loss mask (bytes), by sequence."""
    logprobs: str
    """rollout_logprobs (float32) and, where sampling left tokens out, the counts and the ids of the kept tokens
    (int32); where the sampler said which experts it chose, the rows of `Routes`, by sequence."""
    versions: str
    """The version of each response token (int32)."""
    outcome: str
    """Reward and penalty (float64), prompt, response, ground truth, error, finish reason."""
    training: str
    """The trajectory's advantage (float32) and, where they are recorded, the loss tokens' logprobs and advantages
    (float32), whether they were clipped and whether rejected (bytes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProof:
    """A line of proof.jsonl: a step that was taken."""

    kind: Literal["step"] = "step"
    previous: str
    global_steps: int
    weights: str
    """The digest of the weights after the step."""
    replicas: Mapping[str, WeightTag]
    """The replicas that the update after the step reached: version and checksum that each has verified."""
    records: str
    """SHA-256 of trajectories/step_NNNNNN.jsonl; empty in a supervised run."""
    tokens: str
    """SHA-256 of trajectories/step_NNNNNN.npz, if there is one."""
    trajectories: Sequence[TrajectoryProof]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Facts of a step that only the training knows: the weights that came of it, and who verified them."""

    weights: str = ""
    replicas: Mapping[str, WeightTag] = field(default_factory=dict)


NO_EVIDENCE = Evidence()


class ProofChain:
    """Writes proof.jsonl.

    Example:
        chain = ProofChain(run_dir)
        chain.begin(0, origin)
        chain.add(1, evidence, trajectory_proofs(groups, advantages, tokens), records=..., tokens=...)
        chain.write_certificate(summary)
    """

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._path = run_dir / PROOF_FILE
        self.link = ""
        """The link of the last line."""
        self.weights = ""
        """The digest of the weights after the last line."""
        self.global_steps = 0

    def begin(self, global_steps: int, origin: Origin) -> None:
        """Add the beginning of a process. Raises OSError."""
        config = self._run_dir / CONFIG_FILE
        known = file_sha256(config) if config.exists() else ""
        line = Beginning(previous=self.link, global_steps=global_steps, config=known, origin=origin)
        self._append(line, origin.weights)

    def add(
        self,
        global_steps: int,
        evidence: Evidence,
        trajectories: Sequence[TrajectoryProof] = (),
        *,
        records: str = "",
        tokens: str = "",
    ) -> None:
        """Add a step. Raises OSError, and the chain is then as it was before."""
        line = StepProof(
            previous=self.link,
            global_steps=global_steps,
            weights=evidence.weights,
            replicas=evidence.replicas,
            records=records,
            tokens=tokens,
            trajectories=trajectories,
        )
        self._append(line, evidence.weights)

    def _append(self, line: Beginning | StepProof, weights: str) -> None:
        content = msgspec.json.encode(line)[:-1]
        link = sha256(content)
        append_line(self._path, content + LINK + link.encode() + b'"}\n')
        self.link, self.weights, self.global_steps = link, weights, line.global_steps

    def restore(self, link: str, weights: str, global_steps: int, keep: Callable[[Path, bytes], None]) -> None:
        """Continue after the line with this link. The lines after it are cut from the file, after `keep(path, lines)`
        has taken them. If the link is in another folder's file, all lines of this one are cut. Raise OSError."""
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        ends = [number for number, line in enumerate(lines, 1) if line.endswith(LINK + f'{link}"}}\n'.encode())]
        kept = lines[: max(ends, default=0)]
        if len(kept) < len(lines):
            keep(self._path, b"".join(lines[len(kept) :]))
            write_atomically(self._path, b"".join(kept))
        self.link, self.weights, self.global_steps = link, weights, global_steps

    def write_certificate(self, summary: Mapping[str, Any] | None) -> None:
        """Write certificate.json: how far the run came, the link that stands for it, and the SHA-256 of what is not in
        the chain. Raises OSError.

        Args:
            summary: the content of summary.json, but for the audit; None if the run did not come to its end.
        """
        paths = sorted(path for pattern in CERTIFIED for path in self._run_dir.glob(pattern) if path.is_file())
        certificate = {
            "global_steps": self.global_steps,
            "weights": self.weights,
            "link": self.link,
            "summary": None if summary is None else sha256(json.dumps(summary, indent=2).encode()),
            "files": {str(path.relative_to(self._run_dir)): file_sha256(path) for path in paths},
        }
        write_atomically(self._run_dir / CERTIFICATE_FILE, (json.dumps(certificate, indent=2) + "\n").encode())


def trajectory_proofs(
    groups: Sequence[TrajectoryGroup], advantages: Sequence[FloatArray], trained: TrainedTokens | None
) -> list[TrajectoryProof]:
    """Return the digests of all trajectories of a step. `trained`: of their loss tokens, in their order; None where it
    is not known."""
    proofs: list[TrajectoryProof] = []
    first = 0
    for group, group_advantages in zip(groups, advantages, strict=True):
        for index, trajectory in enumerate(group.trajectories):
            end = first + trajectory.num_loss_tokens
            proofs.append(
                TrajectoryProof(
                    ordinal=group.prompt.ordinal,
                    index=index,
                    outcome=_outcome(group, trajectory),
                    training=_training(group_advantages[index : index + 1], trained, slice(first, end)),
                    **_sampling(trajectory),
                )
            )
            first = end
    return proofs


def _sampling(trajectory: Trajectory) -> dict[str, str]:
    tokens, logprobs, versions = [], [], []
    for sequence in trajectory.sequences:
        tokens.append(struct.pack("<ii", len(sequence.prompt_ids), len(sequence.response_ids)))
        tokens += [np.asarray(ids, "<i4").tobytes() for ids in (sequence.prompt_ids, sequence.response_ids)]
        tokens.append(np.asarray(sequence.loss_mask, np.uint8).tobytes())
        logprobs.append(np.asarray(sequence.rollout_logprobs, "<f4").tobytes())
        versions.append(np.asarray(sequence.token_versions(), "<i4").tobytes())
    kept = KeptTokens.concatenate([(sequence.kept, len(sequence.response_ids)) for sequence in trajectory.sequences])
    if kept is not None and kept.counts.any():
        logprobs += [np.asarray(numbers, "<i4").tobytes() for numbers in (kept.counts, kept.token_ids)]
    logprobs += [part.experts.tobytes() for sequence in trajectory.sequences for part in sequence.routes_in_parts]
    return {"tokens": _digest(*tokens), "logprobs": _digest(*logprobs), "versions": _digest(*versions)}


def _outcome(group: TrajectoryGroup, trajectory: Trajectory) -> str:
    numbers = struct.pack("<dd", trajectory.reward, trajectory.overlong_penalty)
    error, prompt = trajectory.error or "", group.prompt
    texts = (prompt.text, trajectory.text, prompt.ground_truth, error, trajectory.finish_reason)
    return _digest(numbers, *(text.encode("utf-8", "surrogatepass") + b"\0" for text in texts))


def _training(advantage: FloatArray, trained: TrainedTokens | None, own: slice) -> str:
    values = [np.asarray(advantage, "<f4")]
    if trained is not None:
        values += [np.asarray(numbers[own], "<f4") for numbers in (trained.logprobs, trained.advantages)]
        values += [np.asarray(flags[own], np.uint8) for flags in (trained.is_clipped, trained.is_rejected)]
    return _digest(*(array.tobytes() for array in values))


def _digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
