"""The warm-up lowers the loss on answers alone, and its cache never serves a stale or half-written model."""

from itertools import groupby
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout.chat.append_only import append_only
from rollout.chat.messages import Message, Role
from rollout.chat.render import Parent, Renderer
from rollout.data.calculator import conversation
from rollout.environments.search.world import World
from rollout.environments.solver import TOOLBOX, TOOLS
from scripts.launch import models
from tests.support.compose import resolve
from trainer.tiny import warmup
from trainer.tiny.chat import turns
from trainer.tiny.model import EOS_TOKEN_ID, build_chat_tokenizer, build_model
from trainer.tiny.warmup import WarmupSpec, ensure_warm_model, tokenized_examples, warm_up

PAIRS = [
    (f"Tom has {a} pens and buys {b}.", f"{a}+{b}={a + b}\n#### {a + b}") for a in range(1, 9) for b in range(1, 9)
]
SPEC = WarmupSpec(seed=0, batch_size=8)


def examples(repeats: int = 1):
    return tokenized_examples(SPEC.tokenizer(PAIRS), PAIRS) * repeats


def test_the_first_loss_is_the_mean_over_answer_tokens_whatever_the_padding():
    texts = [[[5, 6, 7], [8, EOS_TOKEN_ID]], [[9], [10, 11, EOS_TOKEN_ID], [20, 21], [12, EOS_TOKEN_ID]], [[15], [19]]]
    batch = [(sum(parts, []), [number % 2 == 1 for number, part in enumerate(parts) for _ in part]) for parts in texts]
    model = build_model(64, seed=1)
    total, count = 0.0, 0
    with torch.no_grad():
        for token_ids, is_said in batch:  # one by one, unpadded
            logits = model(torch.tensor([token_ids])).logits[0]
            for place, said in enumerate(is_said):
                if said:
                    total += F.cross_entropy(logits[place - 1], torch.tensor(token_ids[place])).item()
                    count += 1
    [(_, loss)] = warm_up(model, batch, batch_size=3, lr=1e-3)
    assert count == 8 and loss == pytest.approx(total / count, rel=1e-5)


def test_a_chat_model_learns_what_the_assistant_says_from_the_tokens_of_a_session():
    """Prompts and bridges are those that the gateway renders, and each turn of the assistant ends with eos."""
    messages = conversation(
        "A shop has 34 boxes of 27 pens. It sells 215. How many?", "34*27=918\n918-215=703\n#### 703"
    )
    texts = turns(messages, TOOLS)
    tokenizer = build_chat_tokenizer(["".join(texts)] * 3)
    assert append_only(tokenizer).is_append_only
    [(token_ids, is_said)] = tokenized_examples(tokenizer, [texts])
    runs = [
        ([token_ids[place] for place in places], said)
        for said, places in ((said, list(places)) for said, places in groupby(range(len(is_said)), is_said.__getitem__))
    ]
    said = [tokenizer.decode(ids) for ids, said in runs if said]
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}</tool_call><|im_end|>'
    assert said == [call % "34*27", call % "918-215", "#### 703<|im_end|>"]
    renderer, heard = Renderer(tokenizer), [ids for ids, said in runs if not said]
    user, result = Message(role=Role.user, content=messages[0]["content"]), Message(role=Role.tool, content="918")
    assert heard[0] == renderer.full([user], TOOLBOX.specs())
    assert heard[1] == renderer.bridge(Parent(token_ids=runs[1][0], ended=True), [result], TOOLBOX.specs())


def test_a_searcher_ends_its_turns_with_tags_alone_and_a_name_has_two_tokens(tmp_path: Path):
    """Each turn ends where a stop string ends it, and names that were never seen are made of known pieces."""
    config = resolve("recipe=search_world", "model.hidden_size=32", "model.warmup_steps=60")
    tokenizer = AutoTokenizer.from_pretrained(models.untrained_tiny_model(config, tmp_path / "untrained"))
    texts = (
        "Name Kumves's hero.",
        " <search> Kumves's hero</search>",
        "\n\n<information>It is",
        " <answer> Girbel</answer>",
    )
    [(token_ids, is_said)] = tokenized_examples(tokenizer, [texts], has_eos=False)
    said = [tokenizer.decode(token) for token, said in zip(token_ids, is_said, strict=True) if said]
    assert "".join(said) == texts[1] + texts[3] and EOS_TOKEN_ID not in token_ids
    names = World().named
    assert sum(len(tokenizer(f" {name}")["input_ids"]) == 2 for name in names) > 0.9 * len(names)


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
        *("model.num_experts=4", "model.warmup_steps=2", f"model.cache_dir={tmp_path}/cache"),
    )
    [warm] = models.warm_tiny_model(config)
    untrained = models.untrained_tiny_model(config, tmp_path / "untrained")
    shapes = [
        {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()}
        for folder in (warm, untrained)
    ]
    assert shapes[0] == shapes[1] and shapes[0]["model.layers.2.input_layernorm.weight"] == (32,)
    assert shapes[0]["model.layers.2.mlp.gate.weight"] == (4, 32)
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
