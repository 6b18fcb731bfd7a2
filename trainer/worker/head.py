"""From the last hidden states to logprobs: without logits where the model's head allows it, else by its own forward."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.worker.token_logprobs import LogitRule, token_logprobs

logger = logging.getLogger(__name__)

MAX_LOGITS = 2**27
"""Largest number of logits that the model's own forward makes at once. More are made in chunks, and again in the
backward pass."""
SMALL, LARGE = 2.0**-14, 2.0**20
"""Where a soft cap bends nothing, and everything."""
TOLERANCE = 1e-5


class LogprobHead:
    """Makes logprobs of the hidden states that `decoder` returns.

    The first call finds out what the model's own forward does with them. If it is a linear layer, a scale and perhaps a
    soft cap, logprobs come from `token_logprobs`. Anything else is computed by that forward, with all the logits.

    Example:
        head = LogprobHead(causal_lm, decoder, temperature=1.0, entropy_has_gradient=False)
        logprobs, entropy = head(type(outputs), outputs.last_hidden_state[0], targets)
    """

    def __init__(self, causal_lm: Any, decoder: nn.Module, temperature: float, entropy_has_gradient: bool):
        self._causal_lm = causal_lm
        self._decoder = decoder
        self._temperature = temperature
        self._entropy_has_gradient = entropy_has_gradient
        self._is_known = False
        self._rule: LogitRule | None = None

    def __call__(
        self, output_type: type, hidden: Tensor, targets: Tensor, max_logits: int | None
    ) -> tuple[Tensor, Tensor]:
        """(logprobs [T], entropy [T]) of states [T, H] and targets [T].

        Args:
            output_type: what the decoder returns.
            max_logits: the largest number in memory at once; by the device or MAX_LOGITS, if not given.
        """
        if not self._is_known:
            self._rule, self._is_known = self._find_rule(output_type, hidden), True
        if self._rule is None:
            return self._general(output_type, hidden, targets, max_logits or MAX_LOGITS)
        linear = self._causal_lm.get_output_embeddings()
        return token_logprobs(
            hidden,
            linear.weight,
            linear.bias,
            targets,
            temperature=self._temperature,
            rule=self._rule,
            entropy_has_gradient=self._entropy_has_gradient,
            max_logits=max_logits,
        )

    def _find_rule(self, output_type: type, hidden: Tensor) -> LogitRule | None:
        with torch.no_grad():
            rule = find_rule(self._causal_lm, partial(self._logits, output_type), hidden)
        if rule is None:
            name = type(self._causal_lm).__name__
            logger.warning("%s: its logits are more than a scaled linear layer: all are kept in memory", name)
        return rule

    def _general(self, output_type: type, hidden: Tensor, targets: Tensor, max_logits: int) -> tuple[Tensor, Tensor]:
        logprobs = partial(self._logprobs, output_type)
        chunk = max(1, max_logits // self._causal_lm.config.get_text_config().vocab_size)
        if len(targets) <= chunk:
            return logprobs(hidden, targets)
        parts = [
            checkpoint(logprobs, h, t, use_reentrant=False)
            for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])  # pyright: ignore

    def _logprobs(self, output_type: type, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._logits(output_type, hidden).float() / self._temperature  # [T, V]
        logprobs = -F.cross_entropy(logits, targets, reduction="none")
        with torch.set_grad_enabled(self._entropy_has_gradient and torch.is_grad_enabled()):
            log_probs = logits.log_softmax(-1)
            entropy = -(log_probs.exp() * log_probs).sum(-1)
        return logprobs, entropy

    def _logits(self, output_type: type, hidden: Tensor) -> Tensor:
        """[T, H] -> [T, V]: what the model's own forward makes of the states: the head, scaling, soft caps.

        That forward runs with a decoder that has already computed them.
        """
        outputs = output_type(last_hidden_state=hidden[None])
        token_ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        with ExitStack() as stack:
            for module in {self._causal_lm.base_model, self._decoder} - {self._causal_lm}:  # it calls either
                stack.enter_context(answering(module, lambda *args, **kwargs: outputs))
            return self._causal_lm(input_ids=token_ids, use_cache=False).logits[0]


def find_rule(causal_lm: Any, logits_of: Callable[[Tensor], Tensor], hidden: Tensor) -> LogitRule | None:
    """Return what the model's forward does after its head, a linear layer; None if that is no LogitRule.

    The forward is tried on two states, with a head that answers what it is told: the model's weights do not matter.

    Args:
        logits_of: states [T, H] -> logits [T, V], by the model's own forward.
        hidden: [T, H], for its width, dtype and device.
    """
    head = causal_lm.get_output_embeddings()
    if type(head) is not nn.Linear:
        return None
    states = torch.linspace(-1, 1, 2 * hidden.shape[1], device=hidden.device).view(2, -1).to(hidden.dtype)
    told = torch.linspace(-60, 60, 2 * head.out_features, device=hidden.device).view(2, -1)
    told[0, 0], told[0, 1] = SMALL, LARGE
    given: list[Tensor] = []

    def answer(input: Tensor) -> Tensor:
        given.append(input)
        return told[: input[..., 0].numel()].view(*input.shape[:-1], -1).clone()

    with answering(head, answer):
        found = logits_of(states).float()
    if found.shape != told.shape or len(given) != 1 or given[0].dtype != states.dtype:
        return None
    small, large = found[0, 0].item() / SMALL, found[0, 1].item()
    rule = LogitRule(scale=small, soft_cap=large if large < 0.5 * small * LARGE else None)
    is_right = torch.equal(given[0].view_as(states), states) and torch.allclose(found, rule(told), TOLERANCE, TOLERANCE)
    return rule if is_right else None


@contextmanager
def answering(module: nn.Module, answer: Callable[..., Any]) -> Iterator[None]:
    """Let the module's forward be `answer` inside the `with` block."""
    before = vars(module).get("forward")
    module.forward = answer
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
