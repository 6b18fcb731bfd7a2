"""Updates of multi-head latent attention, whose decode multiplies by matrices that vLLM makes of what it has loaded."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache

from configs.weight_forms import LATENT_ATTENTION
from rollout.engines.base import EngineSpec
from rollout.types import Completion
from tests.support.engines import EngineHost, hosted, request, staged, update
from tests.support.latent_models import WITH_EXPERTS, latent_model
from tests.support.weights import publish, tag_of

pytestmark = pytest.mark.slow
PROMPTS = [tuple(random.Random(index).choices(range(5, 250), k=20 + index)) for index in range(4)]


@contextmanager
def serving(folder: Path, engine_spec: EngineSpec) -> Iterator[EngineHost]:
    arguments = {"skip_tokenizer_init": True}
    with hosted(replace(engine_spec, model_path=str(folder), max_model_len=512, engine_args=arguments)) as host:
        host.run(host.engine.tag_loaded(0))
        yield host


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


async def completions(host: EngineHost) -> list[Completion]:
    """Sample from every prompt, alone in the batch, so that the order of sums is the same in every engine. Each first
    token is of a prefill, and all others are of decodes."""
    return [await host.engine.generate(request(ids, temperature=1.0, seed=7, max_tokens=24)) for ids in PROMPTS]


def assert_equal(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


def logprobs(folder: Path, tokens: list[int], start: int, cache: DynamicCache | None = None) -> np.ndarray:
    """Return those of tokens[start:] by transformers. Of the tokens in `cache`, nothing is computed again."""
    known = 0 if cache is None else cache.get_seq_length()
    causal_lm: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = causal_lm(torch.tensor([tokens[known:-1]]), past_key_values=cache, use_cache=True).logits[0]
    return F.log_softmax(logits, -1)[start - 1 - known :].gather(1, torch.tensor(tokens[start:])[:, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp("latent") / str(version) for version in range(3)]
    for version, folder in enumerate(folders):
        latent_model("deepseek_v3", folder, seed=version)
    return folders


@pytest.fixture(scope="module")
def host(folders: list[Path], engine_spec: EngineSpec) -> Iterator[EngineHost]:
    with serving(folders[0], engine_spec) as host:
        yield host


def test_after_an_update_it_computes_as_a_fresh_engine_does(
    host: EngineHost, folders: list[Path], engine_spec: EngineSpec
) -> None:
    with serving(folders[1], engine_spec) as fresh:
        expected = fresh.run(completions(fresh))
    before = host.run(completions(host))
    host.run(update(host.engine, weights_of(folders[1]), 1))
    assert_equal(host.run(completions(host)), expected)
    host.run(update(host.engine, weights_of(folders[0]), 2))
    assert_equal(host.run(completions(host)), before)
    assert not np.array_equal(before[0].logprobs, expected[0].logprobs)


@pytest.mark.parametrize("clear_cache", [False, True], ids=["keep", "recompute"])
def test_requests_in_flight_go_on_with_the_new_weights(
    host: EngineHost, folders: list[Path], clear_cache: bool
) -> None:
    """With the kept KV cache, the new weights read the latent vectors that the old ones wrote."""
    old, new = 10 + 2 * clear_cache, 11 + 2 * clear_cache

    async def scenario() -> list[Completion]:
        await update(host.engine, weights_of(folders[1]), old)
        async with staged(host.engine, weights_of(folders[2]), new) as swap:
            requests = [request(ids, temperature=1.0, max_tokens=400) for ids in PROMPTS]
            tasks = [asyncio.create_task(host.engine.generate(each)) for each in requests]
            await host.every_one_has(len(PROMPTS), 5)
            await swap(clear_cache)
            return await asyncio.gather(*tasks)

    for ids, completion in zip(PROMPTS, host.run(scenario()), strict=True):
        assert [span.global_steps for span in completion.spans] == [old, new]
        tokens, boundary = [*ids, *completion.token_ids.tolist()], completion.spans[0].end
        first_new, cache = len(ids) + boundary, DynamicCache()
        expected = logprobs(folders[1], tokens[:first_new], len(ids), cache)
        np.testing.assert_allclose(completion.logprobs[:boundary], expected, atol=3e-5)
        expected = logprobs(folders[2], tokens, first_new, None if clear_cache else cache)
        np.testing.assert_allclose(completion.logprobs[boundary:], expected, atol=3e-5)


def test_weights_that_come_while_it_is_paused_are_absorbed_too(host: EngineHost, folders: list[Path]) -> None:
    async def scenario() -> list[Completion]:
        manifest = publish(weights_of(folders[2]), 20)
        await host.engine.admission.hold()
        await host.engine.freeze(clear_cache=False)
        assert await host.engine.load(manifest) == [tag_of(manifest)]
        await host.engine.thaw()
        host.engine.admission.release()
        return await completions(host)

    for ids, completion in zip(PROMPTS, host.run(scenario()), strict=True):
        expected = logprobs(folders[2], [*ids, *completion.token_ids.tolist()], len(ids))
        np.testing.assert_allclose(completion.logprobs, expected, atol=3e-5)


@pytest.mark.parametrize("kind", sorted(LATENT_ATTENTION - {"deepseek_v3"}))
def test_every_type_that_is_allowed_is_updated(kind: str, tmp_path: Path, engine_spec: EngineSpec) -> None:
    latent_model(kind, tmp_path / "old"), latent_model(kind, tmp_path / "new", seed=1)
    with serving(tmp_path / "old", engine_spec) as host:
        host.run(update(host.engine, weights_of(tmp_path / "new"), 1))
        for ids, completion in zip(PROMPTS, host.run(completions(host)), strict=True):
            expected = logprobs(tmp_path / "new", [*ids, *completion.token_ids.tolist()], len(ids))
            atol = 1e-4 if kind in WITH_EXPERTS else 3e-5  # one token of glm4_moe_lite differs by 3.4e-5 in float32
            np.testing.assert_allclose(completion.logprobs, expected, atol=atol)
