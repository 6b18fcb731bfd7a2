"""The versions of the policy that sampled what is still to be trained, in host memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from trainer.worker.loading import local

WORDS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """The bits that differ between two versions of a tensor: applied to either, it gives the other."""

    is_changed: Tensor  # uint8 [ceil(N / 8)] a bit for each word
    words: Tensor  # [changed words] their exclusive or

    @classmethod
    def between(cls, before: Tensor, after: Tensor) -> Self:
        """Compare two tensors of one dtype and shape on one device."""
        words = _words(before) ^ _words(after)
        is_changed = words != 0
        padded = nn.functional.pad(is_changed, (0, -len(words) % 8)).to(torch.uint8)
        padded = padded.view(len(padded) // 8, 8)  # a rank may have no row of a parameter
        bits = (padded << torch.arange(8, dtype=torch.uint8, device=words.device)).sum(1, dtype=torch.uint8)
        return cls(bits, words[is_changed])

    @property
    def nbytes(self) -> int:
        return self.is_changed.nbytes + self.words.nbytes

    def to(self, device: torch.device | str) -> "Change":
        return Change(self.is_changed.to(device), self.words.to(device))

    def apply(self, values: Tensor) -> None:
        """Change the other version, on the same device, into this one."""
        places = torch.arange(8, dtype=torch.uint8, device=values.device)
        is_changed = ((self.is_changed[:, None] >> places) & 1).flatten()[: values.numel()].bool()
        words = _words(values)
        words[is_changed] ^= self.words


def _words(values: Tensor) -> Tensor:
    return values.view(-1).view(WORDS[values.element_size()])


class VersionStore:
    """This rank's rows of what is trained, by version, in the dtype in which the trainer computes.

    So a version is, bit for bit, the policy that the trainer computed with at that time: a difference of logprobs
    between two of them is staleness and nothing else. A version is kept as its changes to the one after it where they
    take less memory, which is so for each parameter by itself.

    Example:
        versions = VersionStore(policy, torch.bfloat16)
        versions.keep(4)                          # before the optimizer steps that make another version
        with versions.lent() as load:
            load(4)
            logprobs = policy(batch, device)      # by version 4
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype):
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._dtype = dtype
        self.kept: dict[int, list[Tensor | Change]] = {}
        """The versions, ascending; the newest is whole. A worker goes on with those that another process has kept."""

    def __contains__(self, version: int) -> bool:
        return version in self.kept

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self.kept.values() for part in parts)

    @torch.no_grad()
    def keep(self, version: int) -> None:
        """Copy the weights as they are, which are newer than all that is kept."""
        if version in self:
            return
        before = self.kept[max(self.kept)] if self.kept else None
        whole: list[Tensor | Change] = []
        for place, parameter in enumerate(self._parameters):
            values = local(parameter).to(self._dtype)
            whole.append(_on_host(values))
            if before is not None and isinstance(kept := before[place], Tensor):
                change = Change.between(kept.to(values.device), values)
                before[place] = change.to("cpu") if change.nbytes < kept.nbytes else kept
        self.kept[version] = whole
        _wait_for_copies()

    def drop_before(self, version: int) -> None:
        self.kept = {kept: parts for kept, parts in self.kept.items() if kept >= version}

    @contextmanager
    @torch.no_grad()
    def lent(self) -> Iterator[Callable[[int | None], None]]:
        """Lend the module to other versions: inside the `with` block, what it yields loads one of them, or with None
        the weights that were there before. They are back at the end."""
        before = [_on_host(local(parameter)) for parameter in self._parameters]
        _wait_for_copies()
        loaded: int | None = None

        def load(version: int | None) -> None:
            nonlocal loaded
            if version != loaded:
                loaded = -1  # until all of it is loaded
                for place, parameter in enumerate(self._parameters):
                    values = before[place] if version is None else self._values(version, place, parameter.device)
                    local(parameter).copy_(values, non_blocking=True)
                loaded = version

        try:
            yield load
        finally:
            load(None)
            _wait_for_copies()

    def _values(self, version: int, place: int, device: torch.device) -> Tensor:
        """Return a parameter's values in the version. A version that is kept as changes is rebuilt from the next one
        that is kept whole, backwards."""
        changes: list[Change] = []
        for newer in sorted(kept for kept in self.kept if kept >= version):
            part = self.kept[newer][place]
            if isinstance(part, Tensor):
                values = part.to(device, copy=bool(changes))
                for change in reversed(changes):
                    change.to(device).apply(values)
                return values
            changes.append(part)
        raise KeyError(version)


def _on_host(values: Tensor) -> Tensor:
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return copy.copy_(values, non_blocking=True)


def _wait_for_copies() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
