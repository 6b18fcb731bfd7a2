"""The order of calls to a `vllm serve` process, and what is refused before the first. The process is in
tests/system/weight_sync."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from configs.schema import InFlightKv, Staging, WeightSyncConfig
from weight_sync import vllm_server
from weight_sync.protocol import Manifest, WeightTag, WeightUpdateError
from weight_sync.vllm_server import VllmServer

STATE: dict[str, Any] = {
    "refusal": None,
    "caches_prefixes": False,
    "staged": None,
    "error": None,
    "live": None,
    "is_torn": False,
}
CONFIG = WeightSyncConfig()
MANIFEST = Manifest(transport="shared_memory", global_steps=7, nbytes=0, tensors=(), locations=(None,), checksums=((),))


class FakeServer:
    """Answers as vLLM does, and keeps the order of calls."""

    def __init__(self, **state: Any):
        self.calls: list[str] = []
        self.state = STATE | state
        self.engines = 1
        self.session = False
        self.failing: str | None = None
        self.swaps = True

    def __call__(self, request: httpx.Request) -> httpx.Response:
        route = request.url.path.removeprefix("/")
        body = json.loads(request.content or "null")
        if route != "collective_rpc":
            self.calls.append(f"{route}?{request.url.query.decode()}" if request.url.query else route)
        if route == self.failing:
            return httpx.Response(500, text="Internal Server Error")
        match route:
            case "get_world_size":
                with_dp = request.url.params["include_dp"] == "true"
                return httpx.Response(200, json={"world_size": 2 * self.engines if with_dp else 2})
            case "collective_rpc":
                return httpx.Response(200, json={"results": [self.state, self.state]})
            case "start_weight_update" if self.session:
                return httpx.Response(500)
            case "start_weight_update":
                self.session = True
            case "update_weights" if not body["update_info"]["manifest"]:
                self.session = False
                return httpx.Response(500)
            case "update_weights":
                self.state["staged"] = 1
            case "finish_weight_update" if self.swaps:
                self.session = False
                self.state["live"] = [int(body["weight_version"]), MANIFEST.checksum]
        return httpx.Response(200, json={})


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Callable[..., VllmServer]:
    def connected(fake: FakeServer, config: WeightSyncConfig = CONFIG) -> VllmServer:
        def client(**settings: Any) -> httpx.AsyncClient:
            return real(transport=httpx.MockTransport(fake), **settings)

        real = httpx.AsyncClient
        with monkeypatch.context() as patch:
            patch.setattr(vllm_server.httpx, "AsyncClient", client)
            return VllmServer("http://host:8000/", config)

    return connected


async def test_it_is_paused_for_the_copy_only(connected: Callable[..., VllmServer]) -> None:
    fake = FakeServer()
    async with connected(fake) as server:
        assert server.order(7).receivers == {"http://host:8000": 2}
        fake.calls.clear()
        await server.update(MANIFEST)
        with pytest.raises(ValueError, match="serves version 7: 6 is older"):
            await server.stage(replace(MANIFEST, global_steps=6))
    staged = ["start_weight_update", "update_weights"]
    assert fake.calls == [*staged, "pause?mode=keep&clear_cache=false", "finish_weight_update", "resume"]


@pytest.mark.parametrize(
    ("state", "engines", "reason"),
    [
        ({"refusal": "quantization=fp8 cannot"}, 1, "^http://host:8000: quantization=fp8 cannot"),
        ({"caches_prefixes": True}, 1, "caches prefixes, .* --no-enable-prefix-caching, or set weight_sync.in_flight"),
        ({}, 4, "has 4 data-parallel engines: one is allowed"),
    ],
)
async def test_what_cannot_be_updated_is_refused(
    state: dict[str, Any], engines: int, reason: str, connected: Callable[..., VllmServer]
) -> None:
    fake = FakeServer(**state)
    fake.engines = engines
    with pytest.raises(WeightUpdateError, match=reason):
        async with connected(fake):
            pass
    assert "init_weight_transfer_engine" not in fake.calls


async def test_recomputed_kv_drops_the_prefix_cache(connected: Callable[..., VllmServer]) -> None:
    fake = FakeServer(caches_prefixes=True)
    async with connected(fake, WeightSyncConfig(in_flight_kv=InFlightKv.recompute)) as server:
        await server.update(MANIFEST)
    assert "pause?mode=keep&clear_cache=true" in fake.calls


def test_it_needs_a_shadow(connected: Callable[..., VllmServer]) -> None:
    with pytest.raises(ValueError, match=r"weight_sync.staging=none: .* host or device"):
        connected(FakeServer(), WeightSyncConfig(staging=Staging.none))


async def test_an_update_that_nobody_finished_is_ended_first(connected: Callable[..., VllmServer]) -> None:
    fake = FakeServer()
    fake.session = True
    async with connected(fake) as server:
        fake.calls.clear()
        await server.stage(MANIFEST)
    assert fake.calls == ["start_weight_update", "update_weights"] * 2


@pytest.mark.parametrize("is_torn", [False, True])
async def test_a_server_whose_weights_may_be_torn_stays_paused(
    is_torn: bool, connected: Callable[..., VllmServer]
) -> None:
    fake = FakeServer()
    async with connected(fake) as server:
        await server.stage(MANIFEST)
        fake.failing, fake.state["is_torn"] = "finish_weight_update", is_torn
        with pytest.raises(WeightUpdateError, match="finish_weight_update on http://host:8000: HTTP 500") as caught:
            await server.commit(WeightTag(7, 1))
    assert ("resume" in fake.calls) is not is_torn
    assert ("stays paused" in "".join(getattr(caught.value, "__notes__", []))) is is_torn


async def test_a_server_that_is_not_reached_to_resume_it_is_tried_again(connected: Callable[..., VllmServer]) -> None:
    fake = FakeServer()
    async with connected(fake) as server:
        await server.stage(MANIFEST)
        fake.failing = "resume"
        with pytest.raises(WeightUpdateError, match="^resume on http://host:8000: HTTP 500") as caught:
            await server.commit(WeightTag(7, MANIFEST.checksum or 0))
        assert server.global_steps == 7, "whose weights are whole"
    assert fake.calls[-2:] == ["resume", "resume"]
    assert "so that it may be paused: resume on" in "".join(caught.value.__notes__)


async def test_other_weights_than_the_published_ones_are_noticed(connected: Callable[..., VllmServer]) -> None:
    fake = FakeServer(live=[6, 3])
    fake.swaps = False
    async with connected(fake) as server:
        await server.stage(MANIFEST)
        with pytest.raises(WeightUpdateError, match=r"serve \[\[6, 3\], \[6, 3\]\], published was WeightTag"):
            await server.commit(WeightTag(7, 1))
        assert server.global_steps == -1


async def test_a_commit_goes_on_when_its_caller_is_gone(connected: Callable[..., VllmServer]) -> None:
    fake = FakeServer()
    async with connected(fake) as server:
        await server.stage(MANIFEST)
        committing = asyncio.create_task(server.commit(WeightTag(7, MANIFEST.checksum or 0)))
        await asyncio.sleep(0)
        committing.cancel()
        await asyncio.wait([committing])
    assert fake.calls[-1] == "resume" and server.global_steps == 7
