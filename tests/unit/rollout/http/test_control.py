"""The control routes over a replica and over a fleet: what they do, what they refuse, and who may call them."""

import asyncio

import httpx
import pytest

from tests.support.fakes import ClockedEngine, make_manifest, make_tag, settle
from tests.support.http_clients import fleet_client, generating, replica_client, result


@pytest.mark.parametrize("prefix", ["", "/v1"], ids=["vllm", "fastdeploy"])
async def test_pause_aborts_by_default_and_resume_lets_the_waiting_run(prefix: str) -> None:
    """Both dialects: after 2 s a request of 10 tokens has 2; one that comes while paused runs after the resume."""

    async def is_paused(client: httpx.AsyncClient) -> bool:
        body = (await client.get(f"{prefix}/is_paused")).json()
        if prefix:
            assert body["status"] == "success"
        return (body["result"] if prefix else body)["is_paused"]

    async with replica_client(ClockedEngine()) as (replica, client):
        running = generating(replica, "running", 10)
        await asyncio.sleep(2.5)
        assert not await is_paused(client)
        paused = await client.post(f"{prefix}/pause")
        assert paused.json() == ({"status": "success", "result": None} if prefix else {"status": "paused"})
        assert await result(running) == (2, "abort"), "the whole steps"
        late = generating(replica, "late", 4)
        await asyncio.sleep(50)
        assert await is_paused(client) and not late.done()
        assert (await client.post(f"{prefix}/pause")).status_code == 200, "twice is as once"
        resumed = await client.post(f"{prefix}/resume")
        assert resumed.json() == ({"status": "success", "result": None} if prefix else {"status": "resumed"})
        assert (await client.post(f"{prefix}/resume")).status_code == 200
        assert not await is_paused(client)
        assert await result(late) == (4, "stop")


async def test_keep_freezes_and_clear_cache_is_passed_on_only_when_asked() -> None:
    engine = ClockedEngine()
    async with replica_client(engine) as (replica, client):
        running = generating(replica, "running", 10)
        await asyncio.sleep(2.5)
        await client.post("/pause?mode=keep")
        await asyncio.sleep(100)
        await client.post("/resume")
        assert await result(running) == (10, "stop")
        await client.post("/pause?mode=keep&clear_cache=true")
        assert engine.events == ["freeze", "thaw", "freeze clearing the cache"]


async def test_wait_returns_when_the_running_are_done_and_not_later_than_its_deadline() -> None:
    async with replica_client(ClockedEngine()) as (replica, client):
        clock = asyncio.get_running_loop().time
        running = generating(replica, "running", 10)
        await settle()
        too_late = await client.post("/pause?mode=wait&timeout_s=4")
        assert (too_late.status_code, clock()) == (504, 4)
        assert too_late.json() == {"error": "pause(wait) on r0 took longer than timeout_s=4.0"}
        assert not replica.is_paused()
        assert (await client.post("/pause?mode=wait")).status_code == 200
        assert (await result(running), clock()) == ((10, "stop"), 10)


async def test_what_cannot_be_had_is_refused_with_the_reason() -> None:
    async with replica_client(ClockedEngine()) as (replica, client):
        unknown = await client.post("/pause?mode=freeze")
        assert unknown.status_code == 422
        assert unknown.json() == {"error": "query.mode: Input should be 'abort', 'wait' or 'keep'"}
        assert (await client.post("/pause?timeout_s=0")).status_code == 422
        generating(replica, "running", 1000)
        await settle()
        waiting = asyncio.create_task(client.post("/pause?mode=wait"))
        await settle()
        conflict = await client.post("/pause?mode=keep")
        assert conflict.status_code == 409
        assert conflict.json()["error"].startswith("a pause in mode wait is under way: resume first")
        await client.post("/resume")
        interrupted = await waiting
        assert interrupted.status_code == 409
        assert interrupted.json() == {"error": "a resume came while the pause waited for running requests"}


async def test_abort_ends_the_named_requests_running_frozen_or_waiting() -> None:
    async with replica_client(ClockedEngine(max_num_seqs=2)) as (replica, client):
        tasks = {name: generating(replica, name, 100) for name in "abcd"}
        await asyncio.sleep(2.5)
        await client.post("/pause?mode=keep")
        ended = await client.post("/v1/abort_requests", json={"req_ids": ["a", "c", "z"]})
        assert ended.json()["result"] == {"aborted": ["a", "c"], "not_found": ["z"]}
        assert await result(tasks["a"]) == (3, "abort"), "the step under way ended before it froze"
        assert await result(tasks["c"]) == (0, "abort"), "it never ran, and answers all the same"
        rest = await client.post("/v1/abort_requests", json={"abort_all": True})
        assert rest.json() == {"status": "success", "result": {"aborted": ["b", "d"], "not_found": []}}
        assert replica.is_paused(), "an abort leaves the pause as it was"
        nobody = await client.post("/v1/abort_requests", json={"req_ids": []})
        assert (nobody.status_code, nobody.json()["detail"]) == (400, "must provide abort_all=true or req_ids")


async def test_health_versions_and_metrics() -> None:
    engine = ClockedEngine(max_num_seqs=1)
    async with replica_client(engine) as (replica, client):
        generating(replica, "running", 100)
        generating(replica, "waiting", 100)
        await asyncio.sleep(1)
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/versions")).json() == {"r0": 3}
        await client.post("/pause?mode=keep")
        lines = (await client.get("/metrics")).text.splitlines()
        for expected in ("global_steps 3", "paused 1", "torn 0", "running_requests 1", "waiting_requests 1"):
            name, value = expected.split()
            assert f'slipstream_{name}{{replica="r0"}} {value}.0' in lines
        assert (await client.get("/health")).status_code == 200, "a paused replica is in service"
        engine.kill()
        await settle()
        dead = await client.get("/health")
        assert (dead.status_code, dead.json()) == (503, {"error": "r0 died: the simulated engine was killed"})


async def test_a_torn_replica_is_out_of_service_and_cannot_be_resumed() -> None:
    engine = ClockedEngine()
    async with replica_client(engine) as (replica, client):
        await replica.stage(make_manifest(4))
        engine.errors["swap"] = OSError("half-way")
        with pytest.raises(OSError, match="half-way"):
            await replica.commit(make_tag(4))
        torn = await client.get("/health")
        assert (torn.status_code, "r0 are torn" in torn.json()["error"]) == (503, True)
        resumed = await client.post("/resume")
        assert (resumed.status_code, "a whole update must come first" in resumed.json()["error"]) == (409, True)
        assert (await client.get("/versions")).json() == {"r0": 3}


async def test_the_same_routes_act_on_all_replicas() -> None:
    engines = [ClockedEngine(), ClockedEngine()]
    events = [engine.events for engine in engines]
    async with fleet_client(*engines) as (replicas, client, _):
        tasks = [generating(replica, replica.name, 100) for replica in replicas]
        await asyncio.sleep(1.5)
        assert (await client.post("/pause?mode=keep")).json() == {"status": "paused"}
        assert [replica.is_paused() for replica in replicas] == [True, True]
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        await client.post("/resume")
        ended = await client.post("/v1/abort_requests", json={"req_ids": ["r1"]})
        assert ended.json()["result"] == {"aborted": ["r1"], "not_found": []}
        await settle()
        assert [task.done() for task in tasks] == [False, True]
        assert (await client.get("/versions")).json() == {"r0": 3, "r1": 3}
        assert [event for replica_events in events for event in replica_events] == ["freeze", "thaw"] * 2
        engines[0].exported_metrics = lambda: "# TYPE vllm:kv gauge\nvllm:kv 0.5\n"
        metrics = (await client.get("/metrics")).text
        assert 'vllm:kv{replica="r0"} 0.5' in metrics
        assert 'slipstream_running_requests{replica="r0"} 1.0' in metrics
        assert 'slipstream_running_requests{replica="r1"} 0.0' in metrics


@pytest.mark.parametrize(("errors", "status"), [({}, 504), ({"freeze": OSError("no reply")}, 500)])
async def test_a_pause_past_its_deadline_is_504_where_nothing_else_fails(
    errors: dict[str, Exception], status: int
) -> None:
    engines = [ClockedEngine(), ClockedEngine()]
    async with fleet_client(*engines) as (replicas, client, _):
        engines[0].errors |= errors
        generating(replicas[1], "long", 1000)
        await settle()
        late = await client.post("/pause?mode=wait&timeout_s=4")
        assert (late.status_code, len(late.json()["replicas"])) == (status, 1 + len(errors))


async def test_a_conflict_on_the_replicas_is_a_conflict_of_the_fleet() -> None:
    async with fleet_client(ClockedEngine(), ClockedEngine()) as (replicas, client, _):
        for replica in replicas:
            generating(replica, replica.name, 1000)
        await settle()
        waiting = asyncio.create_task(client.post("/pause?mode=wait"))
        await settle()
        conflict = await client.post("/pause?mode=keep")
        assert (conflict.status_code, sorted(conflict.json()["replicas"])) == (409, ["r0", "r1"])
        await client.post("/resume")
        assert (await waiting).status_code == 409


async def test_the_fleet_is_in_service_while_one_replica_is() -> None:
    async with fleet_client(ClockedEngine(), ClockedEngine()) as (_, client, router):
        await router.eject("r0", RuntimeError("torn"))
        assert (await client.get("/health")).status_code == 200
        await router.eject("r1", RuntimeError("torn"))
        answer = await client.get("/health")
        assert (answer.status_code, answer.json()) == (503, {"error": "no replica is in service"})
