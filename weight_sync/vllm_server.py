"""A `vllm serve` process as a target of weight updates, over vLLM's own HTTP routes.

The server is started with these, and with the folder of this project in PYTHONPATH (receiver/vllm_backend.py):
    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --no-enable-prefix-caching \\
        --worker-extension-cls weight_sync.receiver.vllm_backend.Extension \\
        --weight-transfer-config '{"backend": "slipstream"}'

Facts this rests on (vLLM 0.32):
- The routes of weight transfer exist in the developer mode only, and ask for no key. Their answers say nothing, so the
  state is asked for by /collective_rpc.
- A server that caches prefixes would let new requests read KV of older weights: /pause with mode=keep keeps that cache,
  and drops it with the KV of requests in flight only (weight_sync.in_flight_kv=recompute).
- An update that was started and not finished keeps the next one from starting. A failed `update_weights` ends it.
- /collective_rpc answers for one data-parallel engine of several.
"""

import asyncio
import pickle
import time
import uuid
from base64 import b64encode
from typing import Any, Self

import httpx

from configs.schema import InFlightKv, Staging, WeightSyncConfig
from weight_sync.protocol import (
    CommitReport,
    Manifest,
    PublishOrder,
    WeightTag,
    WeightUpdateError,
    require_version,
)

FIRST_WAIT_S, LAST_WAIT_S = 0.005, 0.2


class VllmServer:
    """Takes versions as a replica does. Example, for a trainer of one rank, whose files the server can read:

    async with VllmServer("http://127.0.0.1:8000", WeightSyncConfig()) as server:
        manifest = sender.publish(specs, shards, server.order(7))
        report = await server.update(manifest)   # stage while it generates; pause, copy, verify, resume
    """

    def __init__(self, url: str, config: WeightSyncConfig):
        """Take the deadlines, `in_flight_kv` and `staging` from `config`. Raises ValueError for staging=none."""
        if config.staging is Staging.none:
            raise ValueError("weight_sync.staging=none: a server receives into a shadow, so host or device")
        self.name = url.rstrip("/")
        self._config = config
        once = httpx.Limits(max_keepalive_connections=0)  # the server closes a connection after an error
        self._http = httpx.AsyncClient(base_url=self.name, trust_env=False, limits=once)
        self._commit_task: asyncio.Task[CommitReport] | None = None
        self.num_workers = 0
        self.global_steps = -1
        """Tag of the weights that it is known to serve; -1 before the first update by this object."""

    async def __aenter__(self) -> Self:
        try:
            await self._connect()
        except BaseException:
            await self._http.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._commit_task is not None:
            await asyncio.wait([self._commit_task])
        await self._http.aclose()

    async def _connect(self) -> None:
        """Raise WeightUpdateError, with the reason, for a server that cannot be updated."""
        wait_s = self._config.pause_timeout_s
        sizes = [
            (await self._call("GET", "get_world_size", wait_s, params={"include_dp": with_dp}))["world_size"]
            for with_dp in ("true", "false")
        ]
        if sizes[0] != sizes[1]:
            raise WeightUpdateError(f"{self.name} has {sizes[0] // sizes[1]} data-parallel engines: one is allowed")
        self.num_workers = sizes[0]
        for state in await self._states():
            if state["refusal"] is not None:
                raise WeightUpdateError(f"{self.name}: {state['refusal']}")
            if state["caches_prefixes"] and self._config.in_flight_kv is InFlightKv.keep:
                what = f"{self.name} caches prefixes, and new requests would read KV of older weights"
                raise WeightUpdateError(
                    f"{what}: start it with --no-enable-prefix-caching, or set weight_sync.in_flight_kv=recompute"
                )
        info = {
            "replica": self.name,
            "stage_timeout_s": self._config.stage_timeout_s,
            "staging_on_device": self._config.staging is Staging.device,
        }
        await self._call("POST", "init_weight_transfer_engine", wait_s, json={"init_info": info})

    def order(self, global_steps: int) -> PublishOrder:
        """Return what the senders of all trainer ranks need in order to publish this version for it."""
        require_version(global_steps)
        return PublishOrder(
            global_steps=global_steps,
            receivers={self.name: self.num_workers},
            base=None,
            nonce=uuid.uuid4().hex[:8],
            timeout_s=self._config.stage_timeout_s,
        )

    async def update(self, manifest: Manifest) -> CommitReport:
        """Stage, then commit, weights of a transport that knows their checksum when it has published them."""
        if manifest.checksum is None:
            raise ValueError(f"{manifest.transport} has to send: call `stage` and the senders' `send`, then `commit`")
        await self.stage(manifest)
        return await self.commit(WeightTag(manifest.global_steps, manifest.checksum))

    async def stage(self, manifest: Manifest) -> None:
        if manifest.global_steps < self.global_steps:
            raise ValueError(f"{self.name} serves version {self.global_steps}: {manifest.global_steps} is older")
        wait_s = self._config.stage_timeout_s
        try:
            async with asyncio.timeout(wait_s):
                await self._start()
                await self._update_weights(b64encode(pickle.dumps(manifest)).decode())
                pause_s = FIRST_WAIT_S
                while not await self._have_staged():
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LAST_WAIT_S)
        except TimeoutError:
            what = f"staging version {manifest.global_steps} on {self.name}"
            raise WeightUpdateError(f"{what} took longer than weight_sync.stage_timeout_s={wait_s}") from None

    async def commit(self, tag: WeightTag) -> CommitReport:
        """Pause, copy, verify, resume; to the end, even if the caller goes away. Raises WeightUpdateError. The server
        generates again then, with the weights that it has, or stays paused where they may be torn."""
        if self._commit_task is not None and not self._commit_task.done():
            raise RuntimeError(f"{self.name} is in the midst of an update")
        self._commit_task = asyncio.create_task(self._commit(tag))
        return await asyncio.shield(self._commit_task)

    async def _commit(self, tag: WeightTag) -> CommitReport:
        pause_s, swap_s = self._config.pause_timeout_s, self._config.swap_timeout_s
        clear = str(self._config.in_flight_kv is InFlightKv.recompute).lower()
        started = time.monotonic()
        try:
            await self._call("POST", "pause", pause_s, params={"mode": "keep", "clear_cache": clear})
            paused = time.monotonic()
            await self._call("POST", "finish_weight_update", swap_s, json={"weight_version": str(tag.global_steps)})
            live = [state["live"] for state in await self._states()]
            if any(each != [tag.global_steps, tag.checksum] for each in live):
                raise WeightUpdateError(f"workers of {self.name} serve {live}, published was {tag}")
            self.global_steps, swapped = tag.global_steps, time.monotonic()
            await self._call("POST", "resume", pause_s)
        except WeightUpdateError as error:
            await self._resume_if_whole(error)
            raise
        return CommitReport(pause_s=time.monotonic() - started, swap_s=swapped - paused)

    async def _resume_if_whole(self, error: WeightUpdateError) -> None:
        """Open the server where no worker is torn. What goes wrong here is noted in the error."""
        try:
            if any(state["is_torn"] for state in await self._states()):
                error.add_note("its weights may be torn: it stays paused until an update is whole")
            else:
                await self._call("POST", "resume", self._config.pause_timeout_s)
        except WeightUpdateError as unreachable:
            error.add_note(f"then, so that it may be paused: {unreachable}")

    async def _start(self) -> None:
        try:
            await self._call("POST", "start_weight_update", self._config.pause_timeout_s)
        except WeightUpdateError:  # an update before, perhaps by a trainer that has died, was not finished
            try:
                await self._update_weights("")
            except WeightUpdateError:
                await self._call("POST", "start_weight_update", self._config.pause_timeout_s)

    async def _update_weights(self, manifest: str) -> None:
        info = {"update_info": {"manifest": manifest}}
        await self._call("POST", "update_weights", self._config.stage_timeout_s, json=info)

    async def _states(self) -> list[dict[str, Any]]:
        """Return every worker's state."""
        body = {"method": "slipstream_state"}
        states = (await self._call("POST", "collective_rpc", self._config.pause_timeout_s, json=body))["results"]
        if len(states) != self.num_workers:
            raise WeightUpdateError(f"{len(states)} of {self.num_workers} workers of {self.name} answered")
        return states

    async def _have_staged(self) -> bool:
        states = await self._states()
        if errors := [state["error"] for state in states if state["error"] is not None]:
            raise WeightUpdateError(f"{self.name}: {errors[0]}")
        return all(state["staged"] is not None for state in states)

    async def _call(self, method: str, route: str, timeout_s: float, **request: Any) -> Any:
        try:
            answer = await self._http.request(method, f"/{route}", timeout=timeout_s, **request)
        except httpx.HTTPError as error:
            raise WeightUpdateError(f"{route} on {self.name} failed: {type(error).__name__}: {error}") from error
        if answer.is_error:
            hint = "; is VLLM_SERVER_DEV_MODE=1 set?" if answer.status_code == 404 else ""
            raise WeightUpdateError(f"{route} on {self.name}: HTTP {answer.status_code}: {answer.text[:500]}{hint}")
        return answer.json()
