"""Keys that save memory change neither losses, gradients nor weights, on one rank and on two."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from configs.schema import AlgorithmConfig, Config, Layout, RolloutConfig, TrainerConfig
from configs.trainer import GradientCheckpointing
from tests.support.families import random_model
from tests.support.reference import VOCAB_SIZE, branched_groups, double
from tests.support.worker_runs import SAVED_AT, Job, Outcome, one_rank, pack, two_ranks
from trainer.tiny.model import build_model
from trainer.worker.model import Policy, find_decoder, prepared

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("process_as_it_was")]
TIMEOUT_S = 120.0
NUM_STEPS = 4
CONFIG = Config(
    algorithm=AlgorithmConfig(group_size=4),
    rollout=RolloutConfig(temperature=0.8),
    trainer=TrainerConfig(lr=3e-3, weight_decay=0.1, max_grad_norm=0.05, step_timeout_s=TIMEOUT_S),
)
FULL, SELECTIVE = GradientCheckpointing.full, GradientCheckpointing.selective
KEYS: dict[str, dict[str, Any]] = {
    "selective": {"gradient_checkpointing": SELECTIVE},
    "full, offloaded": {"gradient_checkpointing": FULL, "activation_offload": True},
    "on host": {"optimizer_on_host": True},
}


def with_keys(**keys: Any) -> Config:
    return replace(CONFIG, trainer=replace(CONFIG.trainer, **keys))


@pytest.fixture(scope="module")
def runs(process_as_it_was: None, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Outcome]:
    """Run every key on each number of ranks. Moments that are saved from one place go on in the other."""
    folder = tmp_path_factory.mktemp("memory")
    model = build_model(VOCAB_SIZE, seed=0)
    model.save_pretrained(folder / "model")
    groups = [branched_groups(double(model), seed=seed, temperature=0.8) for seed in range(NUM_STEPS)]

    def jobs(num_ranks: int) -> dict[str, Job]:
        plain = Job(CONFIG, str(folder / "model"), pack(groups, Layout.tree, num_ranks))
        of_keys = {name: replace(plain, config=with_keys(**keys)) for name, keys in KEYS.items()}
        saved, on_host = str(folder / f"plain_{num_ranks}"), str(folder / f"on_host_{num_ranks}")
        return {
            "plain": replace(plain, save=saved),
            **of_keys,
            "on host": replace(of_keys["on host"], save=on_host),
            "plain, then on host": replace(of_keys["on host"], load=saved),
            "on host, then plain": replace(plain, load=on_host),
            "on host, then on host": replace(of_keys["on host"], load=on_host),
        }

    alone = {(name, 1): one_rank(job) for name, job in jobs(1).items()}
    both = two_ranks(jobs(2), folder / "answer.pickle", TIMEOUT_S)
    return alone | {(name, 2): outcome for name, outcome in both.items()}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", KEYS)
def test_a_run_is_the_same_bit_by_bit(name: str, num_ranks: int, runs: dict[tuple[str, int], Outcome]) -> None:
    found, plain = runs[name, num_ranks], runs["plain", num_ranks]
    for metrics, expected in zip(found.metrics, plain.metrics, strict=True):
        assert {k: v for k, v in metrics.items() if k[:4] != "perf"} == {
            k: v for k, v in expected.items() if k[:4] != "perf"
        }
    assert_same_weights(found, plain)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", ["plain, then on host", "on host, then plain", "on host, then on host"])
def test_a_resumed_run_goes_on_with_moments_from_either_place(
    name: str, num_ranks: int, runs: dict[tuple[str, int], Outcome]
) -> None:
    found, plain = runs[name, num_ranks], runs["plain", num_ranks]
    assert len(found.metrics) == NUM_STEPS - SAVED_AT
    for metrics, expected in zip(found.metrics, plain.metrics[SAVED_AT:], strict=True):
        assert metrics["actor/grad_norm"] == expected["actor/grad_norm"]
        assert metrics["trainer/optimizer_steps"] == expected["trainer/optimizer_steps"]
    assert_same_weights(found, plain)


def assert_same_weights(found: Outcome, expected: Outcome) -> None:
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name], weight), name


class Products(TorchDispatchMode):
    """Counts products of matrices and attention's forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        is_attention = "attention" in name and "backward" not in name
        self.count += is_attention or name in ("aten.mm.default", "aten.addmm.default", "aten._grouped_mm.default")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "mixtral"])
def test_what_is_costly_is_not_computed_again(family: str) -> None:
    counts = {}
    for how in GradientCheckpointing:
        model = prepared(random_model(family), "", TrainerConfig(gradient_checkpointing=how))
        loss = model(input_ids=torch.arange(48).view(2, 24), use_cache=False).logits.sum()
        with Products() as products:
            loss.backward()
        counts[how] = products.count
    assert counts[SELECTIVE] == counts[GradientCheckpointing.none] < counts[FULL]


def test_a_layer_keeps_its_input_on_the_host_only() -> None:
    """The copies have memory of their own, and nothing as large as a layer's input is kept besides."""
    kept = []
    model = prepared(random_model("qwen3"), "", TrainerConfig(gradient_checkpointing=FULL, activation_offload=True))
    layers = model.model.layers
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, inputs: kept.append(inputs[0]))
    saved = []

    def pack_of_rest(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack_of_rest, lambda tensor: tensor):
        model(input_ids=torch.arange(48).view(2, 24), use_cache=False)
    assert len(kept) == len(layers)
    assert not {tensor.data_ptr() for tensor in kept[1:]} & set(saved)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", [GradientCheckpointing.none, SELECTIVE, pytest.param(FULL, marks=pytest.mark.nightly)])
def test_compiled_layers_of_a_mixture_follow_the_routes_of_each_batch(how: GradientCheckpointing) -> None:
    """What was compiled for the first batch must not keep its experts."""
    torch._dynamo.reset()
    random = np.random.default_rng(0)
    routes = [random.random((2, length, 4, 4)).argsort(-1)[..., :2].astype(np.uint8) for length in (12, 12, 9)]
    states: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    gradients: dict[bool, dict[str, torch.Tensor | None]] = {}
    for compiled in (False, True):
        model = random_model("qwen3_moe")
        policy = Policy(prepared(model, "", TrainerConfig(gradient_checkpointing=how, compile=compiled)), 1.0)
        for chosen in [*routes, None]:
            length = 12 if chosen is None else chosen.shape[1]
            policy.routing.follow(chosen, torch.device("cpu"))
            ids = torch.arange(2 * length).view(2, length) % 64
            hidden = find_decoder(model)(input_ids=ids, use_cache=False).last_hidden_state
            # The last norm makes all rows' squares alike: a sum of squares would have gradients of rounding only.
            (hidden * torch.linspace(-1, 1, hidden.shape[-1])).sum().backward()
            states[compiled].append(hidden.detach())
        gradients[compiled] = {name: parameter.grad for name, parameter in model.named_parameters()}
    for found, expected in zip(states[True], states[False], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert min((states[True][0] - states[True][other]).abs().max() for other in (1, 3)) > 1e-2
    for name, gradient in gradients[False].items():
        found = gradients[True][name]
        assert found is gradient or (found is not None and gradient is not None), name
        assert gradient is None or (found - gradient).norm() < 1e-4 * gradient.norm(), name  # pyright: ignore


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", GradientCheckpointing)
def test_compiled_layers_give_the_same_and_are_compiled_once(how: GradientCheckpointing) -> None:
    """Twelve layers are more than the graphs that torch keeps of one function. Sums of float32 may be in another
    order."""
    torch._dynamo.reset()
    counters.clear()
    plain, found = ({}, {})
    for compiled, gradients in ((False, plain), (True, found)):
        model = random_model("qwen3", num_hidden_layers=12)
        model = prepared(model, "", TrainerConfig(gradient_checkpointing=how, compile=compiled))
        for shape in ((2, 24), (3, 20)):
            ids = torch.arange(shape[0] * shape[1]).view(shape) % 64
            logprobs = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
            logprobs[..., 3].sum().backward()
        gradients |= {name: parameter.grad for name, parameter in model.named_parameters()}
    assert 0 < counters["stats"]["unique_graphs"] < 6
    for name, gradient in plain.items():
        assert (found[name] - gradient).norm() < 1e-4 * gradient.norm(), name
