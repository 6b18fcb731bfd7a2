"""GPUs: what their data sheets promise, and what of it is reached."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.validate import ConfigError

GPU_CHECK = Path("runs/gpu_check")
"""The folder in which `make gpu-check` leaves its figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU in a machine with eight of them. Bytes and operations are per second, those of links in one direction."""

    name: str
    source: str
    memory: float
    """Bytes."""
    bfloat16: float
    """Operations per second of dense matrices."""
    float32: float
    """The same in float32, without TF32."""
    hbm: float
    nvlink: float
    network: float
    """To other machines, for each GPU."""
    host: float
    """To the memory of the host, over PCIe."""

    def link(self, num_gpus: int) -> float:
        """Return the slowest link between so many GPUs."""
        return self.nvlink if num_gpus <= GPUS_PER_MACHINE else self.network


GPUS_PER_MACHINE = 8
CARDS: Mapping[str, Card] = {
    card.name: card
    for card in (
        Card(
            name="A100",
            source="NVIDIA A100 80GB SXM and DGX A100 data sheets",
            memory=80e9,
            bfloat16=312e12,
            float32=19.5e12,
            hbm=2.039e12,
            nvlink=300e9,
            network=25e9,
            host=32e9,
        ),
        Card(
            name="H100",
            source="NVIDIA H100 SXM and DGX H100 data sheets",
            memory=80e9,
            bfloat16=989.4e12,
            float32=67e12,
            hbm=3.35e12,
            nvlink=450e9,
            network=50e9,
            host=64e9,
        ),
        Card(
            name="H200",
            source="NVIDIA H200 SXM and DGX H200 data sheets",
            memory=141e9,
            bfloat16=989.4e12,
            float32=67e12,
            hbm=4.8e12,
            nvlink=450e9,
            network=50e9,
            host=64e9,
        ),
        Card(
            name="B200",
            source="NVIDIA DGX B200 data sheet",
            memory=180e9,
            bfloat16=2250e12,
            float32=80e12,
            hbm=8e12,
            nvlink=900e9,
            network=50e9,
            host=64e9,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Factor:
    """The share of a roofline that is reached, and who says so."""

    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The share of the rooflines that is reached: one factor for each part of a run."""

    training: Factor = Factor(
        0.55,
        "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: 5,762 tokens/s on each of 8 H100 (2.4 TB/s), Llama "
        "3.1 8B, FSDP2 without compilation; 10,502 by this roofline",
    )
    decoding: Factor = Factor(0.72, "assumed: the share of the memory's bandwidth that reads weights and KV cache")
    transfers: Factor = Factor(0.8, "assumed: a ring of NCCL on NVLink, and pinned copies over PCIe")

    @property
    def parts(self) -> dict[str, Factor]:
        return {"training and prefill": self.training, "decoding": self.decoding, "transfers": self.transfers}


def find_card(name: str) -> Card:
    """Return the card of that name. Raise ConfigError if it is unknown."""
    if name.upper() not in CARDS:
        raise ConfigError(f"card={name}: must be one of {', '.join(CARDS)}")
    return CARDS[name.upper()]


def find_reach(card: Card, folder: Path = GPU_CHECK) -> Reach:
    """Return the factors of this machine's GPU where `make gpu-check` has measured them, else the public ones."""
    reach = Reach()
    trainer = _figures(folder, "trainer_1.5b")
    if (mfu := trainer.get("mfu")) is not None:
        # What is recomputed does not count in an MFU, and does in a roofline: four passes for three.
        reach = replace(reach, training=Factor(mfu * 4 / 3, f"{folder}/trainer_1.5b.json: MFU {mfu:.2f}"))
    updates = _figures(folder, "updates_1.5b")
    pairs = [("device", card.hbm / 2), ("host", card.host)]
    copies = [(updates[f"{name}_floor_ms"] / 1e3, peak, name) for name, peak in pairs if f"{name}_floor_ms" in updates]
    if copies:
        seconds, peak, name = copies[-1]
        share = updates["weights_gb"] * 1e9 / seconds / peak
        reach = replace(reach, transfers=Factor(share, f"{folder}/updates_1.5b.json: one copy from the {name}"))
    return reach


def _figures(folder: Path, part: str) -> dict[str, Any]:
    file = folder / f"{part}.json"
    return json.loads(file.read_bytes()).get("figures", {}) if file.is_file() else {}
