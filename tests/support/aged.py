"""Groups that several versions sampled, and their logprobs by the version of each token, one sequence at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache

from rollout.types import FloatArray, TokenSequence, TrajectoryGroup, VersionSpan


def aged(groups: Sequence[TrajectoryGroup], versions: Sequence[int], seed: int = 0) -> list[TrajectoryGroup]:
    """Return copies whose responses were sampled in one or two turns, each by one or more of the versions, ascending.
    Between turns is a token that nobody sampled."""
    random = np.random.default_rng(seed)

    def sequence(sequence: TokenSequence) -> TokenSequence:
        length = len(sequence.response_ids)
        gap = int(random.integers(1, length)) if length > 2 and random.random() < 0.4 else length
        loss_mask, spans = sequence.loss_mask.copy(), list[VersionSpan]()
        loss_mask[gap : gap + 1] = False
        oldest = 0
        for start, end in ((0, gap), (gap + 1, length)):
            cuts = np.unique(np.concatenate([[start], random.integers(start, max(end, start + 1), 2), [end]]))
            for begin, stop in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
                oldest = int(random.integers(oldest, len(versions)))
                spans.append(VersionSpan(begin, stop, versions[oldest]))
        joined: list[VersionSpan] = []
        for span in spans:
            if span.end > span.start:
                goes_on = joined and (joined[-1].end, joined[-1].global_steps) == (span.start, span.global_steps)
                joined.append(replace(joined.pop(), end=span.end) if goes_on else span)
        return replace(sequence, loss_mask=loss_mask, spans=tuple(joined))

    return [
        replace(
            group,
            trajectories=tuple(
                replace(trajectory, sequences=tuple(map(sequence, trajectory.sequences)))
                for trajectory in group.trajectories
            ),
        )
        for group in groups
    ]


@torch.no_grad()
def behaviour_logprobs(
    models: Mapping[int, nn.Module], sequence: TokenSequence, temperature: float, *, keeps_kv: bool = True
) -> FloatArray:
    """Return [R] what the engine computed when it sampled: each request goes on with the keys and values that it has,
    and a new one begins with none. 0 where nobody sampled."""
    ids, first = torch.from_numpy(sequence.token_ids.astype(np.int64))[None], len(sequence.prompt_ids)
    logprobs, cache, done, before = np.zeros(len(sequence.response_ids), np.float32), DynamicCache(), 0, -1
    for span in sequence.spans:
        if span.start != before or not keeps_kv:
            cache, done = DynamicCache(), 0
        end = first + span.end - 1
        logits = models[span.global_steps](input_ids=ids[:, done:end], past_key_values=cache, use_cache=True).logits[0]
        log_probs = (logits / temperature).log_softmax(-1)[-(span.end - span.start) :]
        chosen = log_probs.gather(1, ids[0, first + span.start : first + span.end, None])[:, 0]
        logprobs[span.start : span.end], done, before = chosen.float().numpy(), end, span.end
    return logprobs


@torch.no_grad()
def own_logprobs(models: Mapping[int, nn.Module], sequence: TokenSequence, temperature: float) -> FloatArray:
    """Return [R] the logprob of each token by its own version alone, in one forward pass over the whole sequence."""
    ids, first = torch.from_numpy(sequence.token_ids.astype(np.int64))[None], len(sequence.prompt_ids)
    versions, logprobs = sequence.token_versions(), np.zeros(len(sequence.response_ids), np.float32)
    for version in set(versions.tolist()) - {-1}:
        logits = models[version](input_ids=ids, use_cache=False).logits[0, first - 1 : -1]
        chosen = (logits / temperature).log_softmax(-1).gather(1, ids[0, first:, None])[:, 0]
        logprobs[versions == version] = chosen.float().numpy()[versions == version]
    return logprobs
