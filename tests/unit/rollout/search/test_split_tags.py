"""Tags that a tokenizer splits: whoever wrote a token decides whether it is trained, and the text what it means."""

import asyncio
from typing import Any

import numpy as np
import pytest

from rollout.agents.loop import Episode, EpisodeTask
from rollout.agents.multi_turn import MultiTurn
from rollout.request_ids import RequestId
from rollout.search.documents import Document
from rollout.search.fts5 import Fts5Retriever
from rollout.search.tags import agent_loop
from rollout.types import Completion, GenerationRequest, Prompt, SamplingParams
from tests.support.episodes import episodes_of
from tests.support.fakes import spans_of
from tests.support.sequences import only

FOUND = "\n\n<information>Doc 1(Title: Faust) Faust is by Goethe.</information>\n\n"
SAID = "<think>Hm</think><search>who wrote Faust</search>", "<answer>Goethe</answer>"


class Pieces:
    """A tokenizer whose tokens are what it was given: the policy's as listed, any other text character by character."""

    is_fast = False

    def __init__(self) -> None:
        self.texts: list[str] = []

    def ids(self, pieces: list[str]) -> list[int]:
        self.texts += pieces
        return [*range(len(self.texts) - len(pieces), len(self.texts))]

    def __call__(self, text: str, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": self.ids([*text])}

    def decode(self, token_ids: Any, skip_special_tokens: bool) -> str:
        return "".join(self.texts[token] for token in token_ids)


def play(turns: list[list[str]]) -> tuple[Episode, Pieces]:
    tokenizer, waiting = Pieces(), iter(turns)

    async def generate(requests: list[GenerationRequest]) -> list[Completion]:
        token_ids = np.array(tokenizer.ids(next(waiting)), np.int32)
        logprobs = np.full(len(token_ids), -1, np.float32)
        spans = spans_of([7] * len(token_ids))
        return [Completion(token_ids=token_ids, logprobs=logprobs, spans=spans, finish_reason="stop", cached_tokens=0)]

    loop = agent_loop(tokenizer, retriever=Fts5Retriever([Document(title="Faust", text="Faust is by Goethe.")]))
    assert isinstance(loop, MultiTurn) and loop.stop == ("</search>", "</answer>")
    prompt = Prompt(ordinal=0, text="Who?", token_ids=(), ground_truth="goethe")
    sampling = SamplingParams(max_tokens=500)
    task = EpisodeTask(request_id=RequestId(ordinal=0, episode=0), prompt=prompt, index=0, sampling=sampling)
    [episode] = asyncio.run(episodes_of(loop, [task], generate))
    return episode, tokenizer


@pytest.mark.parametrize(
    "pieces",
    [
        [[SAID[0]], [SAID[1]]],
        [[*SAID[0]], [*SAID[1]]],
        [["<think>Hm</think><sea", "rch>who wrote Faust</se", "arch>"], ["<answ", "er>Goe", "the</answer", ">"]],
        [["<think>Hm</think", "><search", ">who", " wrote Faust</", "search>"], ["<", "answer>Goethe</answer>"]],
    ],
    ids=["whole", "characters", "in the middle", "at the borders"],
)
def test_a_split_tag_changes_neither_mask_nor_reward(pieces: list[list[str]]) -> None:
    episode, tokenizer = play(pieces)
    assert tokenizer.decode(only(episode).response_ids, skip_special_tokens=True) == SAID[0] + FOUND + SAID[1]
    policy, documents = [[True] * len(turn) for turn in pieces], [False] * len(FOUND)
    assert only(episode).loss_mask.tolist() == [*policy[0], *documents, *policy[1]]
    assert episode.result is not None and (episode.result.reward, episode.finish_reason) == (1.0, "stop")
    assert episode.metrics["searches"] == episode.metrics["exact_match"] == 1


def test_what_the_policy_read_is_not_trained_though_it_says_the_same() -> None:
    """A policy that invents an answer of the retriever has written it: those tokens are trained, and no search."""
    invented = f"{FOUND}<answer>Goethe</answer>"
    episode, _ = play([[SAID[0]], [invented]])
    assert only(episode).loss_mask.tolist() == [True] + [False] * len(FOUND) + [True]
    assert episode.metrics["searches"] == 1
