"""A run over the generated world refuses a retriever of another one, here or behind a server."""

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette

from configs.checks.sections import TRAIN_AND_VAL
from configs.schema import Config
from configs.validate import ConfigError
from rollout.environments.search.documents import Document
from rollout.environments.search.fts5 import Fts5Retriever
from rollout.environments.search.retrievers import what_is_searched
from rollout.environments.search.server import retriever_app
from rollout.http.server import listen, listener_url, served
from scripts.launch.worlds import check_world
from tests.support.compose import changed, resolve

OTHERS = [{"kind": "world", "seed": 1}, {"kind": "world", "documents": 100}]
WHY = "data.generated=search_world asks about the world of seed=0 and documents=20000"


def config_of(**retriever: Any) -> Config:
    return changed(resolve("recipe=search_world"), rollout__agent_args={"retriever": retriever})


@pytest.mark.parametrize("spec", OTHERS)
def test_another_world_is_refused_by_its_key(spec: dict[str, Any]) -> None:
    (name,) = set(spec) - {"kind"}
    with pytest.raises(ConfigError, match=rf"retriever\.{name}={spec[name]}: must be \d+, {WHY}"):
        check_world(config_of(**spec), TRAIN_AND_VAL)


def checked_at_a_server(app: Starlette) -> None:
    async def main() -> None:
        with listen("127.0.0.1", 0) as listener:
            async with served(app, listener):
                url = f"{listener_url(listener)}/retrieve"
                await asyncio.to_thread(check_world, config_of(kind="http", url=url), TRAIN_AND_VAL)

    asyncio.run(main())


def serving(spec: dict[str, Any]) -> Starlette:
    return retriever_app(Fts5Retriever([Document(text="A town.")]), 3, what_is_searched(spec))


@pytest.mark.parametrize("spec", OTHERS)
def test_a_server_of_another_world_is_refused_by_its_url(spec: dict[str, Any]) -> None:
    world = {"seed": 0, "documents": 20000} | spec
    serves = rf"serves kind=world seed={world['seed']} documents={world['documents']}; {WHY}"
    with pytest.raises(ExceptionGroup) as raised:
        checked_at_a_server(serving(spec))
    assert raised.group_contains(ConfigError, match=rf"retriever\.url=http://127\.0\.0\.1:\d+/retrieve: {serves}")


def test_a_server_of_this_world_or_of_anything_else_is_taken() -> None:
    checked_at_a_server(serving({"kind": "world"}))
    checked_at_a_server(serving({"kind": "fts5", "corpus": "wiki"}))
    checked_at_a_server(Starlette())  # it says nothing of what it serves, as Search-R1's
    check_world(config_of(kind="http", url="http://127.0.0.1:9/retrieve"), TRAIN_AND_VAL)


def test_a_run_with_questions_of_its_own_is_left_alone() -> None:
    own = changed(config_of(kind="world", seed=1), data__train_files="a.jsonl", data__val_files="b.jsonl")
    check_world(own, TRAIN_AND_VAL)


def test_the_source_that_searches_another_world_is_named() -> None:
    search = {"data": {"generated": "search_world"}, "rollout": {"agent_args": {"retriever": OTHERS[0]}}}
    with pytest.raises(ConfigError, match=r"^data\.sources\.search: rollout\.agent_args\.retriever\.seed=1: must be 0"):
        check_world(changed(Config(), data__sources={"plain": {}, "search": search}), TRAIN_AND_VAL)
