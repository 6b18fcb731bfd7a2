"""Routers that choose what the sampler's chose, in every layout and family, with their own scores and gradients."""

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from configs.schema import Config, Layout, TrainerConfig
from configs.trainer import GradientCheckpointing
from configs.weight_sync import InFlightKv, WeightSyncConfig
from rollout.types import Routes, Trajectory, TrajectoryGroup, VersionSpan
from tests.support.batches import learning, ones, pack
from tests.support.families import VOCAB_SIZE, random_model
from tests.support.reference import make_group, make_trajectory
from trainer.batch import MicroBatch
from trainer.old_logprobs import mixed_batch
from trainer.worker.model import Policy, decoder_layers, find_decoder, keep_less
from trainer.worker.segments import SegmentCache

CPU = torch.device("cpu")
NUM_EXPERTS, TOP_K, LAYERS = 4, 2, 4
FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_next"]
"""Of the families of `tests.support.families`, those with another router each."""


def own_choice(policy: Policy, ids: Tensor) -> np.ndarray:
    """Return the experts that a model's routers choose by themselves: [N, L, layers, top_k]."""
    chosen = np.zeros((*ids.shape, LAYERS, TOP_K), np.uint8)
    handles = []
    for number, layer in enumerate(decoder_layers(policy.causal_lm)):
        for router in layer.modules():
            if type(router).__name__.endswith(("TopKRouter", "TopkRouter")):

                def note(_: Any, __: Any, outputs: Any, number: int = number) -> None:
                    chosen[:, :, number] = outputs[2].reshape(*ids.shape, TOP_K).numpy()

                handles.append(router.register_forward_hook(note))
    policy.plain_logprobs(ids)
    for handle in handles:
        handle.remove()
    return chosen


def hidden(policy: Policy, ids: Tensor, routes: np.ndarray | None) -> Tensor:
    policy.routing.follow(routes, CPU)
    return find_decoder(policy.causal_lm)(input_ids=ids, use_cache=False).last_hidden_state


def random_ids() -> Tensor:
    return torch.randint(4, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_own_choice_changes_nothing_and_another_one_gives_every_router_a_gradient(family: str) -> None:
    policy, ids = Policy(random_model(family), 1.0), random_ids()
    with torch.no_grad():
        plain, own = hidden(policy, ids, None), own_choice(policy, ids)
        assert torch.equal(hidden(policy, ids, own), plain)
        assert torch.equal(hidden(policy, ids, np.full_like(own, 255)), plain), "unknown: their own choice"
    other = (own + 1) % NUM_EXPERTS
    changed = hidden(policy, ids, other)
    assert (changed - plain).abs().max() > 1e-3
    (changed * torch.linspace(-1, 1, changed.shape[-1])).sum().backward()  # rows' squares are all alike
    ends = (".gate.weight", ".router.weight")
    weights = [weight for name, weight in policy.named_parameters() if name.endswith(ends)]
    assert len(weights) == policy.routing.num_routers >= LAYERS - 1
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in weights)


class ChosenExperts(nn.Module):
    """A layer of Qwen3-MoE written out: each token through the experts that it is sent to, one at a time."""

    def __init__(self, block: Any, chosen: np.ndarray):
        super().__init__()
        self.block, self.chosen = block, chosen

    def forward(self, hidden: Tensor) -> Tensor:
        flat, gate_up, down = hidden.flatten(0, 1), self.block.experts.gate_up_proj, self.block.experts.down_proj
        outputs = []
        for token, experts in zip(flat, self.chosen, strict=True):
            scores = (self.block.gate.weight @ token).softmax(-1)
            total = sum(scores[expert] for expert in experts)
            output = torch.zeros_like(token)
            for expert in experts:
                gate, up = (gate_up[expert] @ token).chunk(2)
                output = output + scores[expert] / total * (down[expert] @ (nn.functional.silu(gate) * up))
            outputs.append(output)
        return torch.stack(outputs).view_as(hidden)


def written_out(model: Any, ids: Tensor, routes: np.ndarray) -> Tensor:
    """Return [N, L - 1] logprobs of all tokens but the first."""
    model = copy.deepcopy(model)
    for number, layer in enumerate(model.model.layers):
        layer.mlp = ChosenExperts(layer.mlp, routes[:, :, number].reshape(-1, TOP_K))
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def routed_groups(seed: int = 0) -> list[TrajectoryGroup]:
    """Two groups whose sequences share prompts, which were routed alike, and lack some rows of the first tokens."""
    random, groups = np.random.default_rng(seed), []

    def drawn(length: int) -> np.ndarray:
        order = random.random((length, LAYERS, NUM_EXPERTS)).argsort(-1)
        return order[..., :TOP_K].astype(np.uint8)

    for ordinal, length in enumerate((5, 3)):
        prompt, of_prompt, trajectories = random.integers(4, VOCAB_SIZE, length), drawn(length), []
        for size in (4, 1, 6):
            trajectory = make_trajectory(prompt.tolist(), random.integers(4, VOCAB_SIZE, size).tolist())
            routes = Routes(experts=np.concatenate([of_prompt, drawn(size - 1)]))
            sequences = (replace(trajectory.sequences[0], routes=routes),)
            trajectories.append(replace(trajectory, sequences=sequences))
        groups.append(make_group(ordinal, trajectories))
    return groups


def packed_batch(groups: list[TrajectoryGroup], layout: Layout) -> MicroBatch:
    ((batch,),) = pack(groups, layout, advantages=ones(groups)).micro_batches
    return batch


@cache
def routed_model() -> Any:
    model = random_model("qwen3_moe", norm_topk_prob=True).double()
    model.config._experts_implementation = "eager"  # no grouped product of doubles
    return model


@cache
def expected_logprobs() -> Tensor:
    """Return [T] over the loss tokens of `routed_groups`, one sequence at a time."""
    expected = []
    for sequence in (t.sequences[0] for group in routed_groups() for t in group.trajectories):
        assert sequence.routes is not None
        ids, length = torch.as_tensor(sequence.token_ids)[None].long(), len(sequence.prompt_ids)
        routes = np.concatenate([sequence.routes.experts, sequence.routes.experts[-1:]])[None]  # the last is no input
        expected.append(written_out(routed_model(), ids, routes)[0, length - 1 :].detach())
    return torch.cat(expected)


@pytest.mark.parametrize("layout", list(Layout))
def test_a_batch_follows_the_routes_of_its_tokens_as_a_forward_that_is_written_out(layout: Layout) -> None:
    batch, policy = packed_batch(routed_groups(), layout), Policy(copy.deepcopy(routed_model()), 1.0)
    expected = expected_logprobs()[torch.as_tensor(batch.index)]
    with torch.no_grad():
        logprobs, _ = policy(batch, CPU)
        unrouted, _ = policy(replace(batch, routes=None), CPU)
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-6)
    assert (unrouted.double() - expected).abs().max() > 1e-2


@pytest.mark.parametrize("checkpointing", [GradientCheckpointing.selective, GradientCheckpointing.full])
def test_layers_that_are_computed_again_follow_the_same_routes(checkpointing: GradientCheckpointing) -> None:
    batch, gradients = packed_batch(routed_groups(), Layout.tree), []
    for kind in (GradientCheckpointing.none, checkpointing):
        policy = Policy(copy.deepcopy(routed_model()), 1.0)
        for layer in decoder_layers(policy.causal_lm):
            keep_less(layer, TrainerConfig(gradient_checkpointing=kind))
        policy(batch, CPU)[0].sum().backward()
        gradients.append({name: parameter.grad for name, parameter in policy.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=1e-9, msg=name)


def test_products_that_experts_add_a_bias_to_in_place_are_computed_again() -> None:
    """With `selective` the others are kept, which torch refuses for what is changed afterwards."""
    gradients = []
    for kind in (GradientCheckpointing.none, GradientCheckpointing.selective):
        policy = Policy(random_model("gpt_oss"), 1.0)
        for layer in decoder_layers(policy.causal_lm):
            keep_less(layer, TrainerConfig(gradient_checkpointing=kind))
        changed = hidden(policy, random_ids(), None)
        (changed * torch.linspace(-1, 1, changed.shape[-1])).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in policy.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("layout", [Layout.tree, Layout.packed])
def test_old_logprobs_follow_the_routes_segment_by_segment(layout: Layout) -> None:
    groups = [replace(group, trajectories=tuple(map(spanning, group.trajectories))) for group in routed_groups()]
    config = Config(trainer=TrainerConfig(layout=layout))
    mixed = mixed_batch(groups, learning(groups, ones(groups)), config, global_steps=2, measured_share=2**62)
    assert mixed is not None
    ((row,),), policy = mixed.rows, Policy(copy.deepcopy(routed_model()), 1.0)
    cache, logprobs = SegmentCache(len(row.owners)), torch.zeros(len(row.batch.index), dtype=torch.float64)
    with torch.no_grad():
        for version in sorted(row.versions):
            segment = row.segment(version)
            logprobs[segment.targets] = policy.segment_logprobs(segment, cache, CPU).double()
    expected = expected_logprobs()[torch.as_tensor(row.batch.index)]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-6)


def test_what_an_update_lets_compute_anew_has_no_routes_of_the_version_before() -> None:
    """The prompt and the first half belong to version 1 too, which has sent them where nobody said."""
    trajectory = spanning(routed_groups()[0].trajectories[0])
    groups = [make_group(0, [trajectory])]
    config = Config(weight_sync=WeightSyncConfig(in_flight_kv=InFlightKv.recompute))
    mixed = mixed_batch(groups, learning(groups, ones(groups)), config, global_steps=2, measured_share=2**62)
    assert mixed is not None
    ((row,),) = mixed.rows
    assert row.batch.routes is not None
    known = (row.batch.routes[0] != 255).any((-1, -2))
    prompt, half = len(trajectory.sequences[0].prompt_ids), 2
    assert known[row.owners == 0].all() and (row.owners == 0).sum() == prompt + half - 1
    assert known[row.owners == 1].tolist() == [False] * (prompt + half - 1) + [True] * half


def spanning(trajectory: Trajectory) -> Trajectory:
    """Let version 0 have begun the response, and version 1 gone on with it."""
    (sequence,) = trajectory.sequences
    length = len(sequence.response_ids)
    spans = tuple(span for span in (VersionSpan(0, length // 2, 0), VersionSpan(length // 2, length, 1)) if span.end)
    return replace(trajectory, sequences=(replace(sequence, spans=spans),))


def test_a_tree_has_the_routes_of_its_first_sequence_that_knows_them() -> None:
    (group, _) = routed_groups()
    batch = packed_batch([group], Layout.tree)
    cut = [
        replace(t, sequences=(replace(t.sequences[0], routes=t.sequences[0].routes.last(keep)),))  # pyright: ignore
        for t, keep in zip(group.trajectories, (3, 2, 9), strict=True)
    ]
    other = packed_batch([replace(group, trajectories=tuple(cut))], Layout.tree)
    assert batch.routes is not None and other.routes is not None
    known = (other.routes != 255).any((-1, -2))
    assert np.array_equal(other.routes[known], batch.routes[known]) and 0 < known.mean() < 1


@pytest.mark.parametrize(
    ("family", "layers", "problem"),
    [
        ("qwen3_moe", LAYERS + 1, "the trainer has 4 layers, and the sampler's routes are of 5"),
        ("qwen3", LAYERS, "the trainer's model has no router that can follow"),
        ("phimoe", LAYERS, "PhimoeTopKRouter has no top-k of 2 of 4 experts"),
    ],
)
def test_routers_that_cannot_follow_warn_once_or_are_refused(
    family: str, layers: int, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy, ids = Policy(random_model(family), 1.0), random_ids()
    routes = np.zeros((*ids.shape, layers, TOP_K), np.uint8)
    with torch.no_grad():
        plain = hidden(policy, ids, None)
        assert all(torch.equal(hidden(policy, ids, routes), plain) for _ in range(2))
        assert caplog.text.count(problem) == 1
        other = Policy(random_model(family), 1.0)
        other.routing.must_follow = True
        with pytest.raises(ValueError, match=f"^model.replay_routes=true: {problem}.*: set it to null or false"):
            hidden(other, ids, routes)
