"""Stop strings end a response with the token that completes them, however it is cut into parts and paused."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from configs.schema import PauseMode, WeightSyncConfig
from rollout.replica.replica import RolloutReplica
from rollout.types import Completion, VersionSpan
from tests.support.engines import BOTH_SCHEDULERS, EngineHost, assert_tokens_equal_tags, push, request, update
from tests.support.weights import FIRST_TOKEN, emitting_weights, publish

pytestmark = pytest.mark.slow

LIMIT = 400
versions = iter(range(222, 254))
"""Versions whose tokens are whole characters, several in each."""


def serve(host: EngineHost, version: int) -> None:
    host.run(update(host.engine, emitting_weights(host.model_path, FIRST_TOKEN + version), version))


def token(version: int) -> int:
    """Return the token that version `version` always samples."""
    return FIRST_TOKEN + version


def text(host: EngineHost, *token_ids: int) -> str:
    return AutoTokenizer.from_pretrained(host.model_path).decode(token_ids)


def question(host: EngineHost) -> tuple[int, ...]:
    """Return a prompt of whole characters: after half a one, vLLM takes the text of the prompt for the response's."""
    return tuple(AutoTokenizer.from_pretrained(host.model_path).encode("Question: how many?\nAnswer: "))


def ask(host: EngineHost, sampled: Sequence[int] = (), **sampling: object) -> Completion:
    """`sampled`: the tokens of earlier parts."""
    sent = request((*question(host), *sampled), **{"max_tokens": LIMIT} | sampling)
    return host.run(host.engine.generate(replace(sent, num_sampled=len(sampled))))


@BOTH_SCHEDULERS
def test_the_response_ends_with_the_token_that_completes_a_stop_string(host: EngineHost, native: bool) -> None:
    """The stop string begins within a token. The sampled tokens are all there, with their logprobs and versions."""
    version = next(versions)
    serve(host, version)
    own = text(host, token(version))
    completion = ask(host, stop=("no such text", own[-1] + own * 2))
    assert (completion.num_tokens, completion.finish_reason) == (3, "stop")
    assert_tokens_equal_tags(completion)
    whole = ask(host, stop=("no such text",))
    assert (whole.num_tokens, whole.finish_reason) == (LIMIT, "length")
    assert whole.logprobs[:3].tolist() == pytest.approx(completion.logprobs.tolist(), abs=1e-5)


@pytest.mark.parametrize("mode", [PauseMode.keep, PauseMode.abort])
@BOTH_SCHEDULERS
def test_a_stop_string_that_began_before_an_update_stops_after_it(
    host: EngineHost, native: bool, mode: PauseMode
) -> None:
    """The weights change between two of its tokens: the request is frozen, or aborted and continued as another part."""
    first, second = next(versions), next(versions)
    sent = request(question(host), max_tokens=LIMIT, stop=(text(host, token(first), token(second)),))

    async def scenario() -> Completion:
        replica = RolloutReplica("replica-0", host.engine, WeightSyncConfig(pause_mode=mode))
        await push(replica, publish(emitting_weights(host.model_path, token(first)), first))
        generating = asyncio.create_task(replica.generate_group([sent]))
        await host.every_one_has(1, 5)
        await push(replica, publish(emitting_weights(host.model_path, token(second)), second))
        return (await generating)[0]

    completion = host.run(scenario())
    assert completion.finish_reason == "stop"
    assert completion.token_ids[-2:].tolist() == [token(first), token(second)]
    end = completion.num_tokens
    assert end > 5 and len(completion.logprobs) == end
    assert completion.spans == (VersionSpan(0, end - 1, first), VersionSpan(end - 1, end, second))


def test_a_stop_string_may_straddle_two_parts(engine_host: EngineHost) -> None:
    version = next(versions)
    serve(engine_host, version)
    own = token(version)
    completion = ask(engine_host, sampled=(own, own), stop=(text(engine_host, own) * 3,))
    assert (completion.token_ids.tolist(), completion.finish_reason) == ([own], "stop")
    assert completion.spans == (VersionSpan(0, 1, version),)
    again = ask(engine_host, sampled=(own,) * 7, stop=(text(engine_host, own) * 3,))
    assert again.num_tokens == 1, "what came before has not stopped it, but its end counts"


def test_a_stop_string_in_the_prompt_stops_nothing(engine_host: EngineHost) -> None:
    version = next(versions)
    serve(engine_host, version)
    own = token(version)
    sent = request((*question(engine_host), own, own), max_tokens=LIMIT, stop=(text(engine_host, own) * 3,))
    assert engine_host.run(engine_host.engine.generate(sent)).num_tokens == 3


def test_a_part_may_end_within_a_character(engine_host: EngineHost) -> None:
    """Byte-level tokens: the first byte of the character is of the earlier part, the second of this."""
    tokenizer = AutoTokenizer.from_pretrained(engine_host.model_path)
    first, second = (tokenizer.convert_tokens_to_ids(byte) for byte in ("Ã", "©"))
    assert tokenizer.decode([first, second]) == "é"
    own = second
    serve(engine_host, own - FIRST_TOKEN)
    completion = ask(engine_host, sampled=(own, first), stop=("é",))
    assert (completion.token_ids.tolist(), completion.finish_reason) == ([own], "stop")
    of_the_prompt = tokenizer.decode(question(engine_host))[0]
    assert ask(engine_host, sampled=(first,), stop=(of_the_prompt,), max_tokens=5).num_tokens == 5


def test_parts_that_were_aborted_continue_to_the_same_end(engine_host: EngineHost) -> None:
    """Cut anywhere, by hand, and continued on what was sampled."""
    version = next(versions)
    serve(engine_host, version)
    own = token(version)
    stop = text(engine_host, own) * 9
    for cut in range(1, 9):
        before = ask(engine_host, max_tokens=cut, stop=(stop,))
        assert (before.num_tokens, before.finish_reason) == (cut, "length")
        rest = ask(engine_host, sampled=before.token_ids.tolist(), stop=(stop,))
        assert (cut + rest.num_tokens, rest.finish_reason) == (9, "stop")


def test_special_tokens_count(engine_host: EngineHost) -> None:
    special = AutoTokenizer.from_pretrained(engine_host.model_path).convert_tokens_to_ids("<unk>")
    weights = emitting_weights(engine_host.model_path, special)
    engine_host.run(update(engine_host.engine, weights, next(versions)))
    completion = ask(engine_host, stop=("<unk><unk>",))
    assert (completion.token_ids.tolist(), completion.finish_reason) == ([special] * 2, "stop")
