"""Logprobs from the last hidden states: without logits where the model's head allows it, else by its own forward."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rollout.types import KeptTokens
from trainer.worker.token_logprobs import LEFT_OUT, LeftOut, LogitRule, token_logprobs

logger = logging.getLogger(__name__)

MAX_LOGITS = 2**27
"""Largest number of logits that the model's own forward makes at once. More are made in chunks, and again in the
backward pass."""
SMALL, LARGE = 2.0**-14, 2.0**20
"""Logits that a soft cap leaves as they are, and that it bends to the cap itself."""
TOLERANCE = 1e-5


class LogprobHead:
    """Makes logprobs of the hidden states that `decoder` returns.

    The first call finds out what the model's own forward does with them. If it is a linear layer, a scale and perhaps a
    soft cap, logprobs come from `token_logprobs`. Anything else is computed by that forward, with all the logits.

    Example:
        head = LogprobHead(causal_lm, decoder, entropy_has_gradient=False)
        logprobs, entropy = head(type(outputs), outputs.last_hidden_state[0], targets, 1.0)
    """

    def __init__(self, causal_lm: Any, decoder: nn.Module, entropy_has_gradient: bool, device_type: str | None = None):
        self._causal_lm = causal_lm
        self._decoder = decoder
        self._entropy_has_gradient = entropy_has_gradient
        self._device_type = device_type
        self._is_known = False
        self._rule: LogitRule | None = None

    def __call__(
        self,
        output_type: type,
        hidden: Tensor,
        targets: Tensor,
        temperature: float,
        max_logits: int | None = None,
        kept: KeptTokens | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (logprobs [T], entropy [T]) of states [T, H] and targets [T].

        Args:
            output_type: the class that the decoder returns.
            temperature: what the logits are divided by.
            max_logits: the largest number in memory at once; by the device or MAX_LOGITS, if not given.
            kept: the tokens that each target was drawn from; the whole vocabulary, if not given.
        """
        if not self._is_known:
            self._rule, self._is_known = self._find_rule(output_type, hidden), True
        if self._rule is None:
            return self._general(output_type, hidden, targets, temperature, max_logits or MAX_LOGITS, kept)
        linear = self._causal_lm.get_output_embeddings()
        return token_logprobs(
            hidden,
            linear.weight,
            linear.bias,
            targets,
            temperature=temperature,
            rule=self._rule,
            entropy_has_gradient=self._entropy_has_gradient,
            max_logits=max_logits,
            device_type=self._device_type,
            kept=kept,
        )

    def next_token_logprobs(self, output_type: type, hidden: Tensor, temperature: float) -> Tensor:
        """Return log pi of every token after states [T, H]: [T, V]."""
        return (self._logits(output_type, hidden).float() / temperature).log_softmax(-1)

    def _find_rule(self, output_type: type, hidden: Tensor) -> LogitRule | None:
        with torch.no_grad():
            rule = find_rule(self._causal_lm, lambda states: self._logits(output_type, states), hidden)
        if rule is None:
            name = type(self._causal_lm).__name__
            logger.warning("%s: its logits are more than a scaled linear layer: all are kept in memory", name)
        return rule

    def _general(
        self,
        output_type: type,
        hidden: Tensor,
        targets: Tensor,
        temperature: float,
        max_logits: int,
        kept: KeptTokens | None,
    ) -> tuple[Tensor, Tensor]:
        chunk = max(1, max_logits // self._causal_lm.config.get_text_config().vocab_size)
        if len(targets) <= chunk:
            return self._logprobs(output_type, hidden, targets, temperature, kept)
        starts = range(0, len(targets), chunk)
        kept_parts = [None if kept is None else kept.cut(s, min(s + chunk, len(targets))) for s in starts]
        parts = [
            checkpoint(self._logprobs, output_type, h, t, temperature, k, use_reentrant=False)
            for h, t, k in zip(hidden.split(chunk), targets.split(chunk), kept_parts, strict=True)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])  # pyright: ignore

    def _logprobs(
        self, output_type: type, hidden: Tensor, targets: Tensor, temperature: float, kept: KeptTokens | None
    ) -> tuple[Tensor, Tensor]:
        logits = self._logits(output_type, hidden).float() / temperature  # [T, V]
        if kept is not None and len(targets):
            rows, columns = map(slice, (0, 0), logits.shape)
            logits = logits.masked_fill(LeftOut(kept, columns.stop, logits.device).mask(rows, columns), LEFT_OUT)
        logprobs = -F.cross_entropy(logits, targets, reduction="none")
        with torch.set_grad_enabled(self._entropy_has_gradient and torch.is_grad_enabled()):
            log_probs = logits.log_softmax(-1)
            entropy = -(log_probs.exp() * log_probs).sum(-1)
        return logprobs, entropy

    def _logits(self, output_type: type, hidden: Tensor) -> Tensor:
        """Return the logits [T, V] that the model's own forward makes of states [T, H]: head, scaling, soft caps.

        That forward runs with a decoder that has already computed them.
        """
        outputs = output_type(last_hidden_state=hidden[None])
        token_ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        with ExitStack() as stack:
            # Some models call their base model and some their decoder: both answer with the states.
            for module in {self._causal_lm.base_model, self._decoder} - {self._causal_lm}:
                stack.enter_context(answering(module, lambda *args, **kwargs: outputs))
            return self._causal_lm(input_ids=token_ids, use_cache=False).logits[0]


def find_rule(causal_lm: Any, compute_logits: Callable[[Tensor], Tensor], hidden: Tensor) -> LogitRule | None:
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
    answers = torch.linspace(-60, 60, 2 * head.out_features, device=hidden.device).view(2, -1)
    answers[0, 0], answers[0, 1] = SMALL, LARGE
    inputs: list[Tensor] = []

    def answer(input: Tensor) -> Tensor:
        inputs.append(input)
        return answers[: input[..., 0].numel()].view(*input.shape[:-1], -1).clone()

    with answering(head, answer):
        logits = compute_logits(states).float()
    if logits.shape != answers.shape or len(inputs) != 1 or inputs[0].dtype != states.dtype:
        return None
    small, large = logits[0, 0].item() / SMALL, logits[0, 1].item()
    rule = LogitRule(scale=small, soft_cap=large if large < 0.5 * small * LARGE else None)
    is_right = torch.equal(inputs[0].view_as(states), states)
    is_right = is_right and torch.allclose(logits, rule(answers), TOLERANCE, TOLERANCE)
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
