"""Finds out, by checksums alone, whether what is published changes as what is trained does."""

import re
from collections.abc import Iterable, Mapping

from weight_sync.adapter import is_factor
from weight_sync.protocol import Checksums, Manifest, WeightUpdateError

LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


class PublishedTensors:
    """The checksums of what was published last, and since which version each tensor has them.

    Example:
        tensors.note(manifest_of_version_7)  # raises where no tensor has changed, but the trained weights have
        tensors.unchanged                    # {"lm_head.weight": 4}: since version 4
    """

    def __init__(self) -> None:
        self._trained = ""
        self._version = -1
        self._checksums: dict[str, Checksums] = {}
        self._since: dict[str, int] = {}

    @property
    def unchanged(self) -> Mapping[str, int]:
        """The tensors that were the same in the newest version as in an older one -> the version since which they
        are."""
        return {name: since for name, since in self._since.items() if since < self._version}

    def note(self, manifest: Manifest) -> None:
        """Take note of a publication.

        Raises:
            WeightUpdateError: the trained weights have changed since the last version, and nothing that is published
                has.
        """
        if manifest.checksums is None or not manifest.tensors:  # known only when the bytes have moved, or simulated
            return
        columns = zip(*manifest.checksums, strict=True)
        now = {
            entry.name: column
            for entry, column in zip(manifest.tensors, columns, strict=True)
            if manifest.adapter is None or is_factor(entry.name)  # what it is for never changes
        }
        shared = now.keys() & self._checksums.keys()
        same = {name for name in shared if now[name] == self._checksums[name]}
        has_learned = manifest.trained and self._trained and manifest.trained != self._trained
        if has_learned and shared and same == shared:
            raise WeightUpdateError(
                f"version {manifest.global_steps}: the trained weights have changed since version {self._version}, and "
                f"none of the {len(shared)} tensors that are published has: replicas would sample from old weights "
                "under a new version (or trainer.lr is too small to change one number in rollout.dtype)"
            )
        self._since = {name: self._since[name] if name in same else manifest.global_steps for name in now}
        self._checksums, self._trained, self._version = now, manifest.trained, manifest.global_steps


def tensor_groups(names: Iterable[str]) -> str:
    """Return a few words for many tensors: embedding, layers by number, head, and how many of each."""
    counts: dict[str, int] = {}
    for name in names:
        layer = LAYER.search(name)
        if layer is not None:
            group = f"layer {layer[1]}"
        elif "embed" in name or ".wte" in name:
            group = "embedding"
        else:
            group = "head" if "head" in name else name
        counts[group] = counts.get(group, 0) + 1
    return ", ".join(f"{group} ({count} tensors)" if count > 1 else group for group, count in counts.items())
