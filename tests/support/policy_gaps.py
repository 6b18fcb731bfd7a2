"""How far the logprobs of a trainer's policy are from those of the engine that sampled."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from configs.schema import Layout
from rollout.types import FloatArray, TokenSequence
from tests.support.batches import ones, pack
from tests.support.reference import make_group, make_trajectory
from trainer.worker.model import Policy


def trained_minus_sampled(policy: Policy, sequences: Sequence[TokenSequence], layout: Layout) -> FloatArray:
    """Return [T] the logprobs that the policy computes on its device minus the sampler's."""
    trajectories = [replace(make_trajectory([1], [1]), sequences=(sequence,)) for sequence in sequences]
    groups = [make_group(0, trajectories)]
    ((batch,),) = pack(groups, layout, advantages=ones(groups)).micro_batches
    with torch.no_grad():
        logprobs, _ = policy(batch, policy.causal_lm.device)
    return logprobs.float().cpu().numpy() - batch.tokens.rollout_logprobs


def kl(difference: FloatArray) -> float:
    """Estimate KL(sampler || trainer) by k3."""
    return float(np.mean(np.exp(difference) - 1 - difference))
