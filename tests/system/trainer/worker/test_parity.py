"""Every family of causal LMs is computed as its own forward does, in every layout, or refused by name."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.schema import AlgorithmConfig, Config, DataConfig, Layout, RolloutConfig, TrainerConfig
from configs.trainer import GradientCheckpointing
from configs.validate import ConfigError
from rollout.types import Trajectory, TrajectoryGroup
from tests.support.batches import pack
from tests.support.families import (
    BY_PLACE_IN_ROW,
    FAMILIES,
    RECURRENT,
    SHARES_PARAMETERS,
    VOCAB_SIZE,
    loaded,
    random_model,
)
from tests.support.reference import make_group, make_trajectory, sequence_logprobs
from tests.support.worker_runs import running_worker
from trainer.batch import MicroBatch
from trainer.metrics import to_floats
from trainer.worker import head
from trainer.worker.attention.attention import Attention
from trainer.worker.head import LogprobHead
from trainer.worker.loading import open_causal_lm
from trainer.worker.model import Policy, decoder_layers, prepared
from trainer.worker.parity import refuse_other_logprobs

CPU = torch.device("cpu")
TEMPERATURE = 0.8
SEVEN_TOKENS = 7 * VOCAB_SIZE


def with_layout(layout: Layout) -> Config:
    return Config(rollout=RolloutConfig(temperature=TEMPERATURE), trainer=TrainerConfig(layout=layout))


@pytest.fixture(scope="module")
def groups() -> list[TrajectoryGroup]:
    """Sequences of up to 32 tokens: longer than the windows. Each response but the shortest has a branch."""
    random = np.random.default_rng(0)
    return [
        make_group(ordinal, [branched(random, prompt, length) for length in (1, 6, 17, 20, 12)])
        for ordinal, prompt in enumerate(random.integers(VOCAB_SIZE, size=length).tolist() for length in (12, 7, 1))
    ]


def branched(random: np.random.Generator, prompt: list[int], length: int) -> Trajectory:
    """A response, and another that leaves it half way."""
    response, other = random.integers(VOCAB_SIZE, size=(2, length)).tolist()
    first = make_trajectory(prompt, response, reward=float(length % 2))
    second = make_trajectory(prompt + response[: length // 2], other[length // 2 :])
    return replace(first, sequences=first.sequences + second.sequences) if length > 1 else first


def micro_batch(groups: list[TrajectoryGroup], layout: Layout) -> MicroBatch:
    (batch,) = pack(groups, layout, keep_idle=True).micro_batches[0]
    return batch


def plain(causal_lm: torch.nn.Module, groups: list[TrajectoryGroup], batch: MicroBatch) -> Tensor:
    each = [sequence_logprobs(causal_lm, t, TEMPERATURE)[0] for group in groups for t in group.trajectories]
    return torch.cat(each)[torch.from_numpy(batch.index)]


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {SHARES_PARAMETERS}))
def test_logprobs_are_those_of_the_models_own_forward_or_it_is_refused(
    family: str, groups: list[TrajectoryGroup]
) -> None:
    policy = Policy(random_model(family), TEMPERATURE)
    assert len(decoder_layers(policy)) == policy.causal_lm.config.num_hidden_layers
    refused = {}
    for layout in Layout:
        try:
            refuse_other_logprobs(policy, with_layout(layout), CPU)
        except ConfigError as error:
            refused[layout] = str(error)
            continue
        batch = micro_batch(groups, layout)
        with torch.no_grad():
            logprobs = policy(batch, CPU, SEVEN_TOKENS)[0].double()
            torch.testing.assert_close(logprobs, plain(policy.causal_lm, groups, batch), rtol=0, atol=5e-5)
    if family in BY_PLACE_IN_ROW | RECURRENT:
        assert refused.keys() == ({Layout.tree} if family == "bloom" else {Layout.tree, Layout.packed})
        for layout, line in refused.items():
            assert f"trainer.layout={layout.value}: {type(policy.causal_lm).__name__}" in line
            works = "packed" if family == "bloom" else "rows"
            assert f"set trainer.layout={works}, which works" in line
    else:
        assert refused == {}


@pytest.mark.parametrize("is_general", [False, True])
@pytest.mark.parametrize(
    "family", [pytest.param("falcon_h1", marks=pytest.mark.slow), "gemma2", "granite", "mixtral", "opt", "phi"]
)
def test_gradients_are_those_of_the_models_own_forward_however_few_logits_are_made_at_once(
    family: str, is_general: bool, groups: list[TrajectoryGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits are made by the head's weight, or by the model's own forward because nothing else would do."""
    if is_general:  # as if its head were not understood
        monkeypatch.setattr(head, "find_rule", lambda *_: None)
    causal_lm = random_model(family)
    batch = micro_batch(groups, Layout.rows if family in RECURRENT else Layout.tree)
    weights = torch.randn(len(batch.index), generator=torch.Generator().manual_seed(0))
    policy, sizes, gradients = Policy(causal_lm, TEMPERATURE), [0], []
    watch = causal_lm.get_output_embeddings().register_forward_hook(lambda *call: sizes.append(call[-1].numel()))
    ours = policy(batch, CPU, SEVEN_TOKENS)[0]
    watch.remove()
    assert max(sizes) == SEVEN_TOKENS if is_general else max(sizes) < SEVEN_TOKENS, "only the rule is found by the head"
    for logprobs in (ours, plain(causal_lm, groups, batch)):
        causal_lm.zero_grad()
        (logprobs * weights).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in causal_lm.named_parameters() if p.grad is not None})
    found, expected = gradients
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-5, name


@pytest.mark.parametrize("gradient_checkpointing", GradientCheckpointing)
@pytest.mark.parametrize("family", ["gpt2", "opt", "phimoe", "mixtral"])
def test_nothing_is_dropped_or_jittered_in_training(
    family: str, gradient_checkpointing: GradientCheckpointing, groups: list[TrajectoryGroup], tmp_path: Path
) -> None:
    causal_lm = random_model(family)
    causal_lm.save_pretrained(tmp_path)
    policy = Policy(
        prepared(loaded(tmp_path), "", TrainerConfig(gradient_checkpointing=gradient_checkpointing)), TEMPERATURE
    )
    batch = micro_batch(groups, Layout.tree)
    logprobs, _ = policy(batch, CPU)
    torch.testing.assert_close(logprobs.double(), plain(causal_lm, groups, batch), rtol=0, atol=1e-5)
    logprobs.sum().backward()


def test_a_wrong_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attention, "within", lambda self, rows, decoder: nullcontext())
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM computes other .*set trainer.layout=rows, which works"):
        refuse_other_logprobs(Policy(random_model("llama"), 1.0), with_layout(Layout.tree), CPU)


def test_rounding_refuses_no_model_that_finds_all_tokens_about_as_likely() -> None:
    causal_lm = random_model("llama")
    causal_lm.get_output_embeddings().weight.data *= 1e-6
    refuse_other_logprobs(Policy(causal_lm, 1.0), with_layout(Layout.tree), CPU)


@pytest.mark.parametrize("layout", Layout)
def test_a_wrong_head_is_refused(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Granite scales its logits."""
    monkeypatch.setattr(LogprobHead, "_logits", lambda self, output_type, hidden: self._causal_lm.lm_head(hidden))
    with pytest.raises(ConfigError, match=rf"{layout.value}: GraniteForCausalLM computes other .*no layout works"):
        refuse_other_logprobs(Policy(random_model("granite"), 1.0), with_layout(layout), CPU)


def test_layers_that_share_parameters_are_refused(tmp_path: Path) -> None:
    random_model(SHARES_PARAMETERS).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"model.path={tmp_path}: layers of Zamba2ForCausalLM share parameters"):
        prepared(open_causal_lm(str(tmp_path))[0], str(tmp_path), TrainerConfig())


def test_positions_that_depend_on_the_batch_are_refused_where_they_are_reached() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    sizes = {"max_position_embeddings": 2048, "original_max_position_embeddings": 512}
    policy = Policy(random_model("phi3", rope_parameters=rope, **sizes), 1.0)
    config = replace(with_layout(Layout.rows), data=DataConfig(max_prompt_tokens=100))
    refuse_other_logprobs(policy, replace(config, rollout=RolloutConfig(max_response_tokens=412)), CPU)
    with pytest.raises(ConfigError, match=r"max_response_tokens=413: must be at most 412 with Phi3ForCausalLM"):
        refuse_other_logprobs(policy, replace(config, rollout=RolloutConfig(max_response_tokens=413)), CPU)


def test_rows_too_long_for_a_mask_of_all_pairs_are_refused_where_a_model_needs_one() -> None:
    def tokens(policy: Policy, layout: Layout, num_tokens: int) -> None:
        config = with_layout(layout)
        trainer = replace(config.trainer, tokens_per_micro_batch=num_tokens)
        refuse_other_logprobs(policy, replace(config, trainer=trainer), CPU)

    falcon, llama = (Policy(random_model(family), 1.0) for family in ("falcon", "llama"))
    for policy, layout, num_tokens in (
        (falcon, Layout.tree, 8192),
        (falcon, Layout.rows, 8193),
        (llama, Layout.tree, 8193),
    ):
        tokens(policy, layout, num_tokens)
    with pytest.raises(ConfigError, match=r"trainer.layout=tree: FalconForCausalLM .* up to 8192 tokens"):
        tokens(falcon, Layout.tree, 8193)


@pytest.mark.usefixtures("process_as_it_was")
def test_a_worker_refuses_a_model_before_the_run(tmp_path: Path) -> None:
    random_model("qwen3_next").save_pretrained(tmp_path)
    refusal = pytest.raises(ConfigError, match="Qwen3NextForCausalLM")
    with refusal, running_worker(with_layout(Layout.tree), str(tmp_path)):
        pass


@pytest.mark.usefixtures("process_as_it_was")
@pytest.mark.parametrize("family", ["gemma2", "opt"])
def test_policy_reference_and_critic_of_another_family_train(
    family: str, groups: list[TrajectoryGroup], tmp_path: Path
) -> None:
    """OPT's last hidden states are narrower than its hidden size, and its decoder is not what its base model is."""
    causal_lm = random_model(family)
    causal_lm.save_pretrained(tmp_path)
    causal_lm.set_attn_implementation("eager")  # the other leaves out Gemma's soft cap
    config = replace(with_layout(Layout.tree), algorithm=AlgorithmConfig(advantage="gae", kl_loss_coef=0.1))
    size = sum(group.num_tokens for group in groups)
    known = {"values": np.zeros(size, np.float32), "returns": np.ones(size, np.float32)}
    batch = micro_batch(groups, Layout.tree)
    step = pack(groups, Layout.tree, keep_idle=True)
    with running_worker(config, str(tmp_path)) as (worker, inbox):
        scores = worker.score((batch,))
        expected = plain(causal_lm, groups, batch).detach().numpy()
        assert scores["reference_logprobs"][0] == pytest.approx(expected, abs=1e-5)
        reference = {"reference_logprobs": step.gather([scores["reference_logprobs"]])}
        (ready,) = pack(groups, Layout.tree, keep_idle=True, **known, **reference).micro_batches[0]
        metrics = to_floats(worker.train_step((ready,), 0).metrics)
        assert metrics["actor/grad_norm"] > 0 and metrics["critic/grad_norm"] > 0
        assert metrics["actor/skipped_steps"] == 0
