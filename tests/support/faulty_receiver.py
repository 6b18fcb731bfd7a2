"""A receiver of weights that can be broken in one place, from outside of the worker's process."""

from weight_sync.receiver.shadow import Shadow
from weight_sync.receiver.slots import AdapterSlots
from weight_sync.receiver.vllm_receiver import WeightReceiver

SWAPS = {Shadow: Shadow.swap_in, AdapterSlots: AdapterSlots.swap_in}


class FaultyReceiver(WeightReceiver):
    def receiver_break_swaps(self, broken: bool) -> None:
        """Let swaps do nothing from now on, or mend them."""
        for place, swap_in in SWAPS.items():
            place.swap_in = (lambda place: None) if broken else swap_in
