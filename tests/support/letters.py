"""A tokenizer with a token per letter, and a replica that answers in letters."""

from typing import Any

import numpy as np

from rollout.types import Completion, GenerationRequest, VersionSpan

EOS = 0


class FakeTokenizer:
    """One token per character. EOS is left out of decoded text."""

    eos_token_id, added_tokens_decoder, special_tokens_map = EOS, {}, {}
    name_or_path, chat_template = "", None

    def decode(self, token_ids: Any, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(token) for token in token_ids if token != EOS)


class FakeReplica:
    """Answers request i of a prompt with the letters of `answers[i]` and an EOS, sampled by version 4 and then 5."""

    def __init__(self, *answers: str):
        self.calls: list[list[GenerationRequest]] = []
        self._answers = answers

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        self.calls.append(requests)
        return [self._complete(answer) for _, answer in zip(requests, self._answers, strict=True)]

    def _complete(self, answer: str) -> Completion:
        token_ids = np.array([*map(ord, answer), EOS], np.int32)
        return Completion(
            token_ids=token_ids,
            logprobs=-np.arange(len(token_ids), dtype=np.float32),
            spans=(VersionSpan(0, 1, 4), VersionSpan(1, len(token_ids), 5)),
            finish_reason="stop",
            cached_tokens=len(answer),
        )
