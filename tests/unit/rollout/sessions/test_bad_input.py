"""Whatever is sent to a session, by whomever: an answer, or a refusal in the dialect's own form, and never a fault."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import Config, RolloutConfig, SessionsConfig
from rollout.sessions.app import DIALECTS, session_app
from rollout.sessions.harness import Connection
from rollout.sessions.harness_loop import SessionHost
from tests.support.bodies import CHANGES, JSON, MINIMAL, USER
from tests.support.chat_models import chat_tokenizer
from tests.support.harnesses import Policy, episode_task

ROUTES = {path: MINIMAL[dialect] for path, dialect in DIALECTS.items()}
COUNT, INPUT_TOKENS = "/v1/messages/count_tokens", "/v1/responses/input_tokens"
TEXTS = st.text(max_size=20) | st.sampled_from(
    [
        "<|im_end|>",
        "<think>",
        "</think>\n",
        "<tool_response>x</tool_response>",
        "{}",
        '{"a": 1}',
        "[INST]",
        "\x00",
        "\ue000",
    ]
)
"""Contents, arguments and names that templates and tokenizers might stumble over."""


class Gateway:
    """A real host, whose policy says what it is told to, and a client of it."""

    def __init__(self, runner: asyncio.Runner, family: str):
        self.runner = runner
        config = Config(rollout=RolloutConfig(max_response_tokens=10_000), sessions=SessionsConfig(max_turns=64))
        self.host: SessionHost = SessionHost.of(config, chat_tokenizer(family))
        self.policy = Policy(lambda text, request: "<think>\nEasy.\n</think>\n\nIt is 4.")
        self.policy.tokenizer = chat_tokenizer(family)
        self.app = session_app(self.host)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test", timeout=30)

    def with_two_sessions(self, test: Callable[[httpx.AsyncClient, Connection, Connection], Awaitable[None]]) -> None:
        async def main() -> None:
            first_session, other = (self.host.open(episode_task(index), self.policy.generate) for index in range(2))
            async with first_session as (_, first), other as (_, second), self.client() as client:
                await test(client, first, second)

        self.runner.run(main())

    def check(self, requests: list[tuple[str, Any]]) -> list[httpx.Response]:
        """Send them one after another, in one session of their own. None of them may be a fault."""

        async def ask() -> list[httpx.Response]:
            answers = []
            async with (
                self.host.open(episode_task(), self.policy.generate) as (_, connection),
                self.client() as client,
            ):
                headers = {"authorization": f"Bearer {connection.key}"}
                for path, body in requests:
                    where = f"/sessions/{connection.session}" if path == "/reward" else ""
                    content = body if isinstance(body, str) else json.dumps(body)
                    answers.append(await client.post(where + path, content=content, headers=headers))
                    no_fault(path, answers[-1])
            return answers

        return self.runner.run(ask())


def no_fault(path: str, answer: httpx.Response) -> None:
    assert answer.status_code in (200, 400, 403), answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert "internal_error" not in answer.text
    elif answer.status_code != 200:
        error = answer.json()
        assert 0 < len(error["error"]["message"]) < 2000, error
        assert (error.get("type") == "error") == path.startswith("/v1/messages"), "the form of the dialect"


@pytest.fixture(params=["qwen3", "mistral"], scope="module")
def gateway(request: pytest.FixtureRequest) -> Iterator[Gateway]:
    with asyncio.Runner() as runner:
        gateway = Gateway(runner, request.param)
        yield gateway
        runner.run(gateway.host.close())


ARGUMENTS = TEXTS | JSON.map(json.dumps)
OPTIONS = st.dictionaries(
    st.sampled_from(["enable_thinking", "messages", "tools", "bos_token", "namespace", "loop", "conversation", "x"]),
    JSON,
)
CALLS = st.lists(
    st.fixed_dictionaries({"id": TEXTS, "function": st.fixed_dictionaries({"name": TEXTS, "arguments": ARGUMENTS})}),
    max_size=2,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": TEXTS})
    | st.fixed_dictionaries({"role": st.just("assistant"), "content": TEXTS, "reasoning": TEXTS, "tool_calls": CALLS})
    | st.fixed_dictionaries({"role": st.just("tool"), "content": TEXTS, "tool_call_id": TEXTS}),
    min_size=1,
    max_size=5,
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"name": TEXTS, "description": TEXTS, "parameters": st.dictionaries(TEXTS, JSON, max_size=2)}
    ),
    max_size=2,
).map(lambda tools: [{"type": "function", "function": tool} for tool in tools])
CONVERSATIONS = st.fixed_dictionaries(
    {"model": TEXTS, "messages": MESSAGES},
    optional={
        "tools": TOOLS,
        "chat_template_kwargs": OPTIONS,
        "stop": TEXTS,
        "stream": st.booleans(),
        "n": st.integers(1, 3),
        "max_tokens": st.integers(1, 2**31 - 1),
        "logprobs": st.booleans(),
        "return_token_ids": st.booleans(),
    },
)
TOKENS = st.lists(st.integers(0, 600) | st.integers(0, 2**31 - 1), min_size=1, max_size=4)
PROMPTS = st.fixed_dictionaries({"model": TEXTS, "prompt": TEXTS | TOKENS}, optional={"stop": TEXTS})


@pytest.mark.slow
@pytest.mark.parametrize("path", [*ROUTES, COUNT, INPUT_TOKENS, "/reward"])
@given(bodies=st.lists(JSON | CHANGES, min_size=1, max_size=2))
@settings(max_examples=25)
def test_no_json_is_a_fault(gateway: Gateway, path: str, bodies: list[Any]) -> None:
    least = ROUTES.get(path) or ROUTES.get(path.rpartition("/")[0]) or {"value": 1.0}
    bodies += [least | body for body in bodies if isinstance(body, dict)]
    gateway.check([(path, body) for body in bodies])


@given(bodies=st.lists(CONVERSATIONS, min_size=1, max_size=3))
@settings(max_examples=80)
def test_no_conversation_is_a_fault(gateway: Gateway, bodies: list[Any]) -> None:
    gateway.check([("/v1/chat/completions", body) for body in bodies])


@given(bodies=st.lists(PROMPTS, min_size=1, max_size=3))
@settings(max_examples=25)
def test_no_prompt_is_a_fault(gateway: Gateway, bodies: list[Any]) -> None:
    gateway.check([("/v1/completions", body) for body in bodies])


# -- depth and size ----------------------------------------------------------------------------------------------------


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


DEEP: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"chat_template_kwargs": "DEEP"}),
    ("/v1/chat/completions", {"logit_bias": "DEEP"}),
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f", "parameters": "DEEP"}}]}),
    ("/v1/completions", {"prompt": "DEEP"}),
    ("/v1/responses", {"tools": [{"type": "function", "name": "f", "parameters": "DEEP"}]}),
    ("/v1/messages", {"tools": [{"name": "f", "input_schema": "DEEP"}]}),
    (
        "/v1/messages",
        {
            "messages": [
                {"role": "assistant", "content": [{"id": "c", "name": "f", "input": "DEEP", "type": "tool_use"}]},
                {"role": "user", "content": "Hi"},
            ]
        },
    ),
    ("/reward", {"metrics": "DEEP"}),
]
DEPTHS = (100, 300, 900, 3000, 100_000)


@pytest.mark.parametrize(("path", "fields"), DEEP)
def test_what_is_nested_deeply_is_no_fault(gateway: Gateway, path: str, fields: dict[str, Any]) -> None:
    body = json.dumps(ROUTES.get(path, {"value": 1}) | fields)
    gateway.check([(path, body.replace('"DEEP"', nested(depth))) for depth in DEPTHS])


def test_tools_to_count_and_arguments_that_are_nested_deeply_are_no_fault(gateway: Gateway) -> None:
    body = json.dumps({"model": "m", "messages": [USER], "tools": [{"name": "f", "input_schema": "DEEP"}]})
    gateway.check([(COUNT, body.replace('"DEEP"', nested(depth))) for depth in DEPTHS])
    calls = ({"id": "c", "function": {"name": "f", "arguments": nested(depth)}} for depth in DEPTHS)
    histories = ([USER, {"role": "assistant", "tool_calls": [call]}, USER] for call in calls)
    gateway.check([("/v1/chat/completions", {"model": "m", "messages": messages}) for messages in histories])


def test_a_half_of_a_surrogate_pair_in_the_arguments_of_a_call_is_no_fault(gateway: Gateway) -> None:
    """It is an escape in the JSON of the arguments, which is a text in the JSON of the body: the body itself has no
    such half."""
    call = {"id": "c", "function": {"name": "f", "arguments": r'{"a": "\ud83d", "\udc00": 1}'}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": ""}]
    (answer,) = gateway.check([("/v1/chat/completions", {"model": "m", "messages": messages})])
    assert answer.status_code == 200


@pytest.mark.parametrize("path", [*ROUTES, "/reward"])
def test_numbers_out_of_range_are_no_fault(gateway: Gateway, path: str) -> None:
    names = ("temperature", "value", "max_tokens", "max_output_tokens", "n", "top_k")
    gateway.check([(path, ROUTES.get(path, {}) | {name: 10**400}) for name in names])


@pytest.mark.parametrize("prompt", [[5, 10**6], [2**31 - 1]])
def test_token_ids_that_the_model_does_not_have_are_refused_by_name(gateway: Gateway, prompt: list[int]) -> None:
    (answer,) = gateway.check([("/v1/completions", {"model": "m", "prompt": prompt})])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert str(max(prompt)) in answer.json()["error"]["message"]


# -- keys --------------------------------------------------------------------------------------------------------------

OF_A_SESSION = [
    *(("POST", path) for path in ROUTES),
    *(("POST", path) for path in (COUNT, INPUT_TOKENS, "/reward", "/finish", "/abort")),
    *(("GET", path) for path in ("/v1/models", "/v1/models/m", "/v1/responses/resp_gen_0_x", "")),
]


@pytest.mark.parametrize(("method", "path"), OF_A_SESSION)
def test_no_route_opens_without_its_own_key(gateway: Gateway, method: str, path: str) -> None:
    async def test(client: httpx.AsyncClient, own_session: Connection, other: Connection) -> None:
        url = f"/sessions/{own_session.session}{path}"
        keys = [
            {},
            {"x-api-key": "guess"},
            {"authorization": f"Bearer {own_session.key[:-1]}"},
            {"x-api-key": other.key},
        ]
        for headers, status in zip(keys, (401, 401, 401, 404), strict=True):
            places = [url, path] if path.startswith("/v1") and status == 401 else [url]
            for place in places:
                answer = await client.request(method, place, json=ROUTES.get(path, {"value": 1}), headers=headers)
                assert answer.status_code == status
                error = answer.json()
                assert (error.get("type") == "error") == path.startswith("/v1/messages"), "the form of the dialect"
                assert error["error"]["code"] == ("invalid_api_key" if status == 401 else "session_not_found")
        own = await client.get(f"/sessions/{own_session.session}", headers={"x-api-key": own_session.key})
        assert (own.status_code, own.json()["generations"]) == (200, []), "it is open, and nothing was done in it"

    gateway.with_two_sessions(test)


def test_nobody_goes_on_from_or_rewards_an_answer_of_another_session(gateway: Gateway) -> None:
    async def test(client: httpx.AsyncClient, own_session: Connection, other: Connection) -> None:
        mine, theirs = ({"authorization": f"Bearer {each.key}"} for each in (own_session, other))
        body = ROUTES["/v1/responses"]
        theirs_id = (await client.post("/v1/responses", json=body, headers=theirs)).json()["id"]
        stolen = await client.post("/v1/responses", json=body | {"previous_response_id": theirs_id}, headers=mine)
        assert (stolen.status_code, stolen.json()["error"]["code"]) == (400, "previous_response_not_found")
        item = {"type": "item_reference", "id": theirs_id.replace("resp_", "msg_")}
        referred = await client.post("/v1/responses", json=body | {"input": [USER, item]}, headers=mine)
        assert (referred.status_code, referred.json()["error"]["param"]) == (400, "input[1].id")
        assert (await client.get(f"/v1/responses/{theirs_id}", headers=mine)).status_code == 404
        assert (await client.get(f"/v1/responses/{theirs_id}", headers=theirs)).status_code == 200
        url = f"/sessions/{own_session.session}/reward"
        rewarded = await client.post(url, json={"value": 1, "turn": theirs_id}, headers=mine)
        assert rewarded.status_code == 400 and theirs_id.removeprefix("resp_") in rewarded.text

    gateway.with_two_sessions(test)
