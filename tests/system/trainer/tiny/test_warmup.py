"""The warm-up lowers the loss on answers alone, and its cache never serves a stale or half-written model."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.launch import models
from tests.support.compose import resolve
from trainer.tiny import warmup
from trainer.tiny.model import EOS_TOKEN_ID, build_model, build_tokenizer
from trainer.tiny.warmup import WarmupSpec, ensure_warm_model, tokenized_examples, warm_up

PAIRS = [
    (f"Tom has {a} pens and buys {b}.", f"{a}+{b}={a + b}\n#### {a + b}") for a in range(1, 9) for b in range(1, 9)
]
SPEC = WarmupSpec(seed=0, batch_size=8, prompt_template="Question: {question}\nAnswer: ")


def examples(repeats: int = 1):
    prompts, answers = [question for question, _ in PAIRS], [answer for _, answer in PAIRS]
    tokenizer = build_tokenizer(prompts + answers)
    return tokenized_examples(tokenizer, prompts, answers) * repeats


def test_warm_up_lowers_the_loss():
    losses = list(warm_up(build_model(448, seed=0), examples(repeats=8)[: 30 * 16], batch_size=16, lr=2e-3))
    assert [step for step, _ in losses] == list(range(1, 31))
    assert losses[0][1] > 5.0
    assert losses[-1][1] < 0.5 * losses[0][1]


def test_the_first_loss_is_the_mean_over_answer_tokens_whatever_the_padding():
    batch = [([5, 6, 7], [8, EOS_TOKEN_ID]), ([9], [10, 11, 12, 13, 14, EOS_TOKEN_ID]), ([15, 16, 17, 18], [19])]
    model = build_model(64, seed=1)
    total, count = 0.0, 0
    with torch.no_grad():
        for prompt, answer in batch:  # one by one, unpadded
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            total += F.cross_entropy(logits, torch.tensor(answer), reduction="sum").item()
            count += len(answer)
    [(_, loss)] = warm_up(model, batch, batch_size=3, lr=1e-3)
    assert loss == pytest.approx(total / count, rel=1e-5)


def test_a_warm_model_is_made_once_and_then_found(tmp_path: Path):
    *losses, made = ensure_warm_model(tmp_path, SPEC, PAIRS)
    assert len(losses) == 8
    tokenizer = AutoTokenizer.from_pretrained(made)
    untrained = build_model(len(tokenizer), SPEC.seed).state_dict()
    trained = AutoModelForCausalLM.from_pretrained(made).state_dict()
    assert not torch.equal(trained["model.norm.weight"], untrained["model.norm.weight"])

    assert list(ensure_warm_model(tmp_path, SPEC, list(PAIRS))) == [made]
    assert list(tmp_path.iterdir()) == [made]


def test_engines_start_on_the_shape_and_the_tokenizer_of_the_warm_model(tmp_path: Path):
    config = resolve(
        *("model=small", "model.hidden_size=32", "model.num_layers=3", "data.prompt_template='{Q} {question} A: '"),
        *("model.warmup_steps=2", f"model.cache_dir={tmp_path}/cache"),
    )
    [warm] = models.warm_tiny_model(config)
    untrained = models.untrained_tiny_model(config, tmp_path / "untrained")
    shapes = [
        {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()}
        for folder in (warm, untrained)
    ]
    assert shapes[0] == shapes[1] and shapes[0]["model.layers.2.input_layernorm.weight"] == (32,)
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (warm, untrained)]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    assert len(tokenizers[0]("{Q} Tom A: ")["input_ids"]) == 7, "the template's words are tokens, the spaces too"


def test_a_change_of_the_arithmetic_raises_the_recipes_version():
    """The key of the cache does not see the code: with other numbers here, RECIPE_VERSION must be another one too."""
    model = build_model(448, seed=0)
    *_, (_, loss) = warm_up(model, examples()[:48], batch_size=16, lr=2e-3)
    assert (warmup.RECIPE_VERSION, loss) == (1, pytest.approx(5.85942, rel=1e-4))


def test_of_two_concurrent_runs_both_get_the_one_model(tmp_path: Path):
    making = ensure_warm_model(tmp_path, SPEC, PAIRS)
    assert next(making)
    *_, other = ensure_warm_model(tmp_path, SPEC, PAIRS)
    *_, made = making
    assert other == made and list(tmp_path.iterdir()) == [made]
