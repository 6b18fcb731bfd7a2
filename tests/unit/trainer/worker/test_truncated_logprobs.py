"""The policy's logprobs and entropies are over what each token was drawn from, in every layout and by every head."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema import Layout
from rollout.types import TrajectoryGroup
from tests.support.batches import learning, ones, pack
from tests.support.families import random_model
from tests.support.kept import kept_of, rows_of
from tests.support.reference import make_group, make_trajectory
from tests.support.sequences import only
from trainer.batch import assemble
from trainer.supervised.demonstrations import beside
from trainer.tokens import sampled_tokens
from trainer.worker.model import Policy

CPU, TEMPERATURE = torch.device("cpu"), 0.7


def some_group(vocab_size: int) -> TrajectoryGroup:
    """Responses that begin alike, of which one was drawn from the whole vocabulary."""
    random = np.random.default_rng(0)
    trajectories = []
    for number, response in enumerate(([7, 8, 9, 4], [7, 8, 3], [7, 5, 5, 5, 6], [2])):
        sequence = only(make_trajectory([5, 6, 7], response))
        rows = [sorted({token, *random.integers(0, vocab_size, 5).tolist()}) for token in response]
        kept = None if number == 1 else kept_of([[], *rows[1:]])
        trajectories.append(replace(make_trajectory([5], [1]), sequences=(replace(sequence, kept=kept),)))
    return make_group(0, trajectories)


def expected(model: Any, group: TrajectoryGroup) -> tuple[list[float], list[float]]:
    """Return logprobs and entropies by a plain forward of each sequence."""
    logprobs, entropies = [], []
    for sequence in (only(trajectory) for trajectory in group.trajectories):
        logits = model(torch.as_tensor(sequence.token_ids[None].astype(np.int64))).logits[0] / TEMPERATURE
        rows = [[]] * len(sequence.response_ids) if sequence.kept is None else rows_of(sequence.kept)
        for place, (token, row) in enumerate(zip(sequence.response_ids.tolist(), rows, strict=True)):
            own = row or list(range(logits.shape[1]))
            log_probs = logits[len(sequence.prompt_ids) - 1 + place, own].log_softmax(-1)
            logprobs.append(log_probs[own.index(token)].item())
            entropies.append(-(log_probs.exp() * log_probs).sum().item())
    return logprobs, entropies


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 5])  # with 5, some have nothing to compute
@torch.no_grad()
def test_logprobs_are_over_what_each_token_was_drawn_from(layout: Layout, general: bool, num_ranks: int) -> None:
    model = random_model("qwen3")
    policy = Policy(model, TEMPERATURE)
    policy._head._is_known = general  # with no rule: by the model's own forward
    group = some_group(model.config.vocab_size)
    batch = pack([group], layout, num_ranks, 14, keep_idle=True, advantages=ones([group]))
    made = [[policy(part, CPU, 3 * model.config.vocab_size) for part in parts] for parts in batch.micro_batches]
    for number, truth in enumerate(expected(model, group)):
        found = batch.gather([[each[number].numpy() for each in parts] for parts in made])
        np.testing.assert_allclose(found, truth, atol=1e-5)


@torch.no_grad()
def test_a_demonstration_beside_them_has_the_whole_vocabulary_at_temperature_1() -> None:
    model = random_model("qwen3")
    group, other = some_group(model.config.vocab_size), make_group(1, [make_trajectory([5, 6, 7], [7, 8, 3])])
    groups, both = beside([group], learning([group], ones([group])), [other])
    batch = assemble(groups, both, layout=Layout.tree, num_ranks=1, tokens_per_micro_batch=99, keep_idle=True)
    made = [Policy(model, TEMPERATURE)(part, CPU)[0].numpy() for part in batch.micro_batches[0]]
    found = batch.gather([made])
    np.testing.assert_allclose(found[:-3], expected(model, group)[0], atol=1e-5)
    ids = torch.tensor([[5, 6, 7, 7, 8, 3]])
    plain = model(ids).logits[0, 2:-1].log_softmax(-1).gather(1, ids[0, 3:, None])[:, 0]
    np.testing.assert_allclose(found[-3:], plain, atol=1e-5)
    assert sampled_tokens([other], 0).kept is None
