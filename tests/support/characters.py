"""A tokenizer for tests that need no words, and a policy that writes in it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from rollout.types import Completion, GenerationRequest
from tests.support.fakes import make_completion

EOS = 0
"""A token that says nothing."""


class Characters:
    """A tokenizer with one token per character."""

    is_fast, added_tokens_decoder, special_tokens_map = False, {}, {}

    def __call__(self, text: str, add_special_tokens: bool, verbose: bool = True) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [*map(ord, text)]}

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(token) for token in token_ids if token != EOS)


@dataclass
class Repeats:
    """A policy that says the same at every turn. Version 3 samples it."""

    text: str = "ab"
    requests: list[GenerationRequest] = field(default_factory=list)

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        self.requests += requests
        return [self._say(request) for request in requests]

    def _say(self, request: GenerationRequest) -> Completion:
        token_ids = [*map(ord, self.text), EOS][: request.sampling.max_tokens]
        return make_completion(token_ids, [3] * len(token_ids), "stop" if token_ids[-1] == EOS else "length")
