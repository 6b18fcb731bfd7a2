"""Routers that choose the experts that the sampler's chose (R3, arXiv:2510.11370).

Facts this rests on (transformers 5.19):
- A router is a module whose class is named *TopKRouter. It picks its experts with one `topk` over all of them. Scores,
  their normalization, biases and groups are computed around it, from what `topk` returns: they stay the model's own,
  and so does the router's gradient.
- A router sees the tokens of all rows as one string.
"""

import logging
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rollout.types import unknown_expert

logger = logging.getLogger(__name__)

UNKNOWN = -1
"""The experts of a token whose router chooses by itself."""


class Routing:
    """The routers of a model. Between two calls of `follow` they choose the experts that the first says.

    Example:
        routing = Routing(layers)
        routing.follow(batch.routes, device)
        decoder(input_ids=input_ids)
    """

    def __init__(self, layers: list[nn.Module]):
        """`layers`: of the model, in order."""
        self._num_layers = len(layers)
        # Not a tensor that goes through the layers, whose signatures are the model's. A layer that is computed again in
        # the backward pass reads it again: so it stays until the next forward pass begins.
        self._experts: Tensor | None = None
        self._is_off = False
        self.must_follow = False
        """Raise an error where the routers cannot follow, instead of a warning."""
        self.num_routers = 0
        for number, layer in enumerate(layers):
            for router in layer.modules():
                if type(router).__name__.lower().endswith("topkrouter"):
                    self._wrap(router, number)
                    self.num_routers += 1

    def follow(self, routes: NDArray[np.unsignedinteger] | None, device: torch.device) -> None:
        """Let the routers choose these experts [N, L, layers, top_k], of the tokens as they will come. None: let them
        choose by themselves.

        Raises:
            ValueError: they cannot, and must.
        """
        self._experts = None
        if routes is None or self._is_off:
            return
        if not self.num_routers:
            self._cannot("the trainer's model has no router that can follow the sampler's")
        elif routes.shape[2] != self._num_layers:
            here = f"the trainer has {self._num_layers} layers"
            self._cannot(f"{here}, and the sampler's routes are of {routes.shape[2]}")
        else:
            experts = routes.astype(np.int16)
            # All of them, because the number by itself may be that of the last of 256 experts.
            experts[(routes == unknown_expert(routes.dtype)).all(-1)] = UNKNOWN
            self._experts = torch.as_tensor(experts.reshape(-1, *routes.shape[2:]), device=device)

    def _cannot(self, problem: str) -> None:
        if self.must_follow:
            raise ValueError(f"model.replay_routes=true: {problem}: set it to null or false")
        logger.warning("the trainer's routers choose by themselves: %s (model.replay_routes)", problem)
        self._is_off, self._experts = True, None

    def _wrap(self, router: Any, layer: int) -> None:
        forward = router.forward

        # Compiled code would hold the experts of the first batch.
        @torch.compiler.disable(recursive=True)
        def following(*args: Any, **options: Any) -> Any:
            if self._experts is None:
                return forward(*args, **options)
            routes = self._experts[:, layer]
            with _Following(routes, router.num_experts) as mode:
                outputs = forward(*args, **options)
            if not mode.has_chosen:
                what = f"top-k of {routes.shape[-1]} of {router.num_experts} experts"
                self._cannot(f"{type(router).__name__} has no {what}")
            return outputs

        router.forward = following


def padded(routes: NDArray[np.unsignedinteger], length: int) -> NDArray[np.unsignedinteger]:
    """[N, L, layers, top_k] -> [N, length, layers, top_k], unknown in the padding."""
    added = ((0, 0), (0, length - routes.shape[1]), (0, 0), (0, 0))
    return np.pad(routes, added, constant_values=unknown_expert(routes.dtype))


class _Following(TorchFunctionMode):
    """Answers the `topk` of a router with the experts [T, top_k] that are to be chosen, and their own values."""

    def __init__(self, chosen: Tensor, num_experts: int):
        super().__init__()
        self._chosen, self._num_experts, self.has_chosen = chosen, num_experts, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        outputs = func(*args, **options)
        if func not in (torch.topk, torch.Tensor.topk):
            return outputs
        values, own = outputs
        if args[0].shape[-1] != self._num_experts or own.shape != self._chosen.shape:
            return outputs  # of groups of experts
        self.has_chosen = True
        experts = torch.where(self._chosen == UNKNOWN, own, self._chosen.to(own.dtype))
        return torch.return_types.topk((args[0].gather(-1, experts), experts))
