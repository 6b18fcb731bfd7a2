"""The trainer's computations, written again the slow way: float64, one sequence at a time, nothing packed.

The loss is stated as cases of the advantage's sign, not as the maximum of two surrogates, so that the two
implementations share no formula. Groups to feed both come from `random_groups` and `branched_groups`.
"""

import copy
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from configs.algorithm import AlgorithmConfig, Proximal
from configs.schema import Config
from configs.trainer import ADAM_BETAS
from rollout.types import BoolArray, FloatArray, Prompt, TokenSequence, Trajectory, TrajectoryGroup, VersionSpan
from trainer.learning_rate import num_warmup_steps

VOCAB_SIZE = 64


def make_trajectory(  # noqa: PLR0913
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    *,
    loss_mask: Sequence[bool] | BoolArray | None = None,
    rollout_logprobs: Sequence[float] | FloatArray | None = None,
    reward: float = 0.0,
    spans: tuple[VersionSpan, ...] | None = None,
    finish_reason: str = "stop",
    cached_tokens: int = 0,
    overlong_penalty: float = 0.0,
    error: str | None = None,
) -> Trajectory:
    length = len(response_ids)
    sequence = TokenSequence(
        prompt_ids=np.array(prompt_ids, np.int32),
        response_ids=np.array(response_ids, np.int32),
        loss_mask=np.ones(length, np.bool_) if loss_mask is None else np.array(loss_mask, np.bool_),
        rollout_logprobs=np.array([0.0] * length if rollout_logprobs is None else rollout_logprobs, np.float32),
        spans=(VersionSpan(0, length, 0),) if spans is None else spans,
    )
    return Trajectory(
        sequences=(sequence,),
        reward=reward,
        finish_reason=finish_reason,
        text=" ".join(map(str, response_ids)),
        replica="replica-0",
        cached_tokens=cached_tokens,
        overlong_penalty=overlong_penalty,
        error=error,
    )


def make_group(ordinal: int, trajectories: Sequence[Trajectory]) -> TrajectoryGroup:
    token_ids = tuple(int(token) for token in trajectories[0].sequences[0].prompt_ids)
    prompt = Prompt(ordinal=ordinal, text=f"prompt {ordinal}", token_ids=token_ids, ground_truth=str(ordinal))
    return TrajectoryGroup(prompt=prompt, trajectories=tuple(trajectories))


def random_groups(
    model: nn.Module, seed: int, *, num_groups: int = 4, group_size: int = 4, temperature: float = 1.0
) -> list[TrajectoryGroup]:
    """Ragged groups whose masks have holes, sampled by a neighbour of `model`; the last group's rewards are all equal.

    The rollout logprobs are off by about 0.4, so every clip region and the cap of the importance weights take part.
    """
    random = np.random.default_rng(seed)
    groups = []
    for ordinal in range(num_groups):
        prompt_ids = random.integers(4, VOCAB_SIZE, random.integers(1, 8))
        trajectories = []
        for index in range(group_size):
            response_ids = random.integers(4, VOCAB_SIZE, 1 if index == 0 else random.integers(2, 10))
            sequence = _sampled(model, random, prompt_ids, response_ids, temperature)
            trajectories.append(_rewarded((sequence,), ordinal, index, num_groups))
        groups.append(make_group(ordinal, trajectories))
    return groups


def branched_groups(
    model: nn.Module, seed: int, *, num_groups: int = 4, group_size: int = 4, temperature: float = 1.0
) -> list[TrajectoryGroup]:
    """Groups as those of `random_groups`, but trajectories have up to three branches each, and branches of those. Some
    responses begin with that of the trajectory before."""
    random = np.random.default_rng(seed)
    groups = []
    for ordinal in range(num_groups):
        prompt_ids = random.integers(4, VOCAB_SIZE, random.integers(1, 8))
        before, trajectories = np.empty(0, np.int32), []
        for index in range(group_size):
            alike = before[: random.integers(0, len(before) + 1)]
            before = np.concatenate([alike, random.integers(4, VOCAB_SIZE, random.integers(1, 9))])
            sequences = [_sampled(model, random, prompt_ids, before, temperature)]
            for _ in range(random.integers(0, 4)):
                parent = sequences[random.integers(len(sequences))].token_ids
                begun = parent[: random.integers(len(prompt_ids), len(parent) + 1)]
                response_ids = random.integers(4, VOCAB_SIZE, random.integers(1, 9))
                sequences.append(_sampled(model, random, begun, response_ids, temperature))
            trajectories.append(_rewarded(tuple(sequences), ordinal, index, num_groups))
        groups.append(make_group(ordinal, trajectories))
    return groups


def _sampled(
    model: nn.Module, random: np.random.Generator, prompt_ids: Any, response_ids: Any, temperature: float
) -> TokenSequence:
    loss_mask = random.random(len(response_ids)) < 0.8
    trajectory = make_trajectory(prompt_ids, response_ids, loss_mask=loss_mask)
    with torch.no_grad():
        exact = sequence_logprobs(model, trajectory, temperature)[0].numpy()
    noisy = np.minimum(exact + random.normal(0, 0.4, len(response_ids)), 0)
    return replace(trajectory.sequences[0], rollout_logprobs=np.where(loss_mask, noisy, 0).astype(np.float32))


def _rewarded(sequences: tuple[TokenSequence, ...], ordinal: int, index: int, num_groups: int) -> Trajectory:
    reward = 1.0 if ordinal == num_groups - 1 else float(index % 2 == ordinal % 2)
    return Trajectory(sequences=sequences, reward=reward, finish_reason="stop", text="", replica="replica-0")


def loss_mask_of(trajectory: Trajectory) -> Tensor:
    """Return the masks of the responses of all its sequences, bool [R]."""
    return torch.from_numpy(np.concatenate([sequence.loss_mask for sequence in trajectory.sequences]))


def rollout_logprobs_of(trajectory: Trajectory) -> Tensor:
    """Return those of the responses of all its sequences, float64 [R]."""
    return torch.from_numpy(np.concatenate([sequence.rollout_logprobs for sequence in trajectory.sequences])).double()


def double(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double()


def sequence_logprobs(model: nn.Module, trajectory: Trajectory, temperature: float) -> tuple[Tensor, Tensor]:
    """(logprobs [R], entropy [R]) of the responses, from one plain forward of each whole sequence."""
    found = [_response_logprobs(model, sequence, temperature) for sequence in trajectory.sequences]
    return torch.cat([logprobs for logprobs, _ in found]), torch.cat([entropy for _, entropy in found])


def _response_logprobs(model: nn.Module, sequence: TokenSequence, temperature: float) -> tuple[Tensor, Tensor]:
    ids, start = torch.from_numpy(sequence.token_ids.astype(np.int64)), len(sequence.prompt_ids)
    logits = model(input_ids=ids[None], use_cache=False).logits[0].double() / temperature
    log_probs = logits.log_softmax(-1)[start - 1 : -1]
    chosen = log_probs[torch.arange(len(log_probs)), ids[start:]]
    return chosen, -(log_probs.exp() * log_probs).sum(-1)


def advantages_of(group: TrajectoryGroup) -> list[float]:
    rewards = [trajectory.reward for trajectory in group.trajectories]
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (std + 1e-6) for reward in rewards]


def learning_tokens(
    model: nn.Module, groups: Sequence[TrajectoryGroup], temperature: float
) -> tuple[list[Tensor], Tensor, Tensor]:
    """(log pi / mu per trajectory, entropy, advantage) of every masked token whose trajectory has an advantage."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    exact = double(model)
    for group in groups:
        for trajectory, advantage in zip(group.trajectories, advantages_of(group), strict=True):
            mask = loss_mask_of(trajectory) & (advantage != 0)
            with torch.no_grad():
                logprobs, entropy = sequence_logprobs(exact, trajectory, temperature)
            log_ratio = logprobs - rollout_logprobs_of(trajectory)
            if mask.any():
                parts.append((log_ratio[mask], entropy[mask], torch.full_like(logprobs, advantage)[mask]))
    log_ratios, entropies, advantages = zip(*parts, strict=True)
    return list(log_ratios), torch.cat(entropies), torch.cat(advantages)


def token_losses(
    logprobs: Tensor, before: Tensor, rollout_logprobs: Tensor, advantage: float, algorithm: AlgorithmConfig
) -> Tensor:
    """A >= 0: -A min(r, 1 + high); A < 0: -A min(max(r, 1 - low), c); each times min(pi_old / mu, cap)."""
    old = rollout_logprobs if algorithm.proximal is Proximal.rollout else before
    ratio = torch.exp(logprobs - old)
    if advantage >= 0:
        bounded = ratio.clamp(max=1 + algorithm.clip_ratio_high)
    else:
        bounded = ratio.clamp(min=1 - algorithm.clip_ratio_low, max=algorithm.clip_ratio_c)
    return -advantage * bounded * torch.exp(old.detach() - rollout_logprobs).clamp(max=algorithm.importance_cap)


def grpo_loss(
    model: nn.Module,
    groups: Sequence[TrajectoryGroup],
    config: Config,
    first_model: nn.Module | None = None,
    before: nn.Module | None = None,
) -> Tensor:
    """Token mean over every masked token of the step, those of advantage 0 too.

    With `first_model` also the entropy bonus and the KL to it, by the k3 estimator. `before`: the model before the
    first optimizer step on the batch, if this is another.
    """
    losses, num_tokens = torch.zeros((), dtype=torch.float64), 0
    temperature = config.rollout.temperature
    for group in groups:
        for trajectory, advantage in zip(group.trajectories, advantages_of(group), strict=True):
            mask = loss_mask_of(trajectory)
            logprobs, entropy = (x[mask] for x in sequence_logprobs(model, trajectory, temperature))
            rollout_logprobs = rollout_logprobs_of(trajectory)[mask]
            with torch.no_grad():
                old = sequence_logprobs(before or model, trajectory, temperature)[0][mask]
            losses = losses + token_losses(logprobs, old, rollout_logprobs, advantage, config.algorithm).sum()
            if first_model is not None:
                with torch.no_grad():
                    log_ratio = sequence_logprobs(first_model, trajectory, temperature)[0][mask]
                log_ratio = log_ratio - logprobs
                losses = losses + config.algorithm.kl_loss_coef * (log_ratio.exp() - 1 - log_ratio).sum()
                losses = losses - config.algorithm.entropy_coef * entropy.sum()
            num_tokens += int(mask.sum())
    return losses / num_tokens


def sampled_logprobs(model: nn.Module, groups: Sequence[TrajectoryGroup], temperature: float) -> FloatArray:
    """Return the logprobs of all sampled tokens, [T], by plain forwards."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    with torch.no_grad():
        parts = [sequence_logprobs(model, one, temperature)[0][loss_mask_of(one)] for one in trajectories]
    return torch.cat(parts).float().numpy()


class ReferenceTrainer:
    """Optimizer steps on one plain float64 model: global norm, clipping and AdamW by their formulas."""

    def __init__(self, model: nn.Module, config: Config):
        self.model = double(model)
        self.first_model = double(model) if config.algorithm.kl_loss_coef else None
        self.config = config
        self._moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self.model.named_parameters()}

    def step(
        self, groups: Sequence[TrajectoryGroup], global_steps: int, before: nn.Module | None = None
    ) -> tuple[float, float]:
        """(loss, gradient norm before clipping) of the optimizer step that `global_steps` others precede."""
        trainer = self.config.trainer
        self.model.zero_grad()
        loss = grpo_loss(self.model, groups, self.config, self.first_model, before)
        loss.backward()
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        norm = sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5
        lr = trainer.lr * min(1.0, (global_steps + 1) / max(1, num_warmup_steps(trainer)))
        count = global_steps + 1
        for name, parameter in self.model.named_parameters():
            gradient = gradients[name] * min(1.0, trainer.max_grad_norm / (norm + 1e-6))
            first, second = self._moments[name]
            first = ADAM_BETAS[0] * first + (1 - ADAM_BETAS[0]) * gradient
            second = ADAM_BETAS[1] * second + (1 - ADAM_BETAS[1]) * gradient.square()
            self._moments[name] = (first, second)
            unbiased = first / (1 - ADAM_BETAS[0] ** count)
            scale = (second / (1 - ADAM_BETAS[1] ** count)).sqrt() + 1e-8
            with torch.no_grad():
                parameter.mul_(1 - lr * trainer.weight_decay).sub_(lr * unbiased / scale)
        return loss.item(), norm
