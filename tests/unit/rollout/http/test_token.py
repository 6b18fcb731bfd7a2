"""Who may use the control routes, and where a token does not show."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from configs.checks.sections import serve_problems
from configs.load import without_token
from configs.schema import Config, Device, ServeConfig
from configs.validate import ConfigError
from rollout.http.control import OPEN_PATHS, RequireToken, control_app
from rollout.replica.app import ReplicaControl
from scripts.serve import serve
from tests.support.compose import changed, invocation, resolve
from tests.support.fakes import ClockedEngine
from tests.support.http_clients import client_of, make_replica


async def test_with_a_token_only_probes_are_open() -> None:
    replica = make_replica(ClockedEngine())
    app = RequireToken(control_app(ReplicaControl(replica), False), "s3cret", OPEN_PATHS)
    calls = [("POST", "/pause"), ("POST", "/resume"), ("GET", "/is_paused"), ("POST", "/v1/pause")]
    calls += [("POST", "/v1/resume"), ("GET", "/v1/is_paused"), ("POST", "/v1/abort_requests"), ("GET", "/docs")]
    async with client_of(app) as client:
        for method, path in calls:
            for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
                refused = await client.request(method, path, headers=given)
                assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer"), path
        assert not replica.is_paused()
        for path in OPEN_PATHS:
            assert (await client.get(path)).status_code == 200, path
        await client.post("/pause", headers={"authorization": "Bearer s3cret"})
        assert replica.is_paused()


def test_a_token_is_required_to_listen_beyond_this_machine() -> None:
    def lines(**serve: Any) -> list[str]:
        config = Config(serve=ServeConfig(**serve))
        return [problem.line(config) for problem in serve_problems(config)]

    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert not lines(host=host), host
    for host in ("0.0.0.0", "::", "192.168.0.7", "example.org"):
        [line] = lines(host=host)
        assert line.startswith(f"serve.token=None: serve.host={host} is not")
        assert not lines(host=host, token="s3cret")
    for token in ("", "  ", "sch\u00f6n", "two\nlines"):
        assert lines(token=token) == ["serve.token=(not shown): must be printable ASCII, and not empty"]


def test_a_token_is_required_where_replicas_listen_beyond_this_machine(tmp_path: Path) -> None:
    """On a cluster each listens on its node's address. Refused before anything starts."""
    config = changed(resolve(), ray__address="10.0.0.1:6379", device=Device.cpu, dry_run=True)
    with pytest.raises(ConfigError, match=r"serve\.token=None: with ray\.address=10\.0\.0\.1:6379 .* need a token"):
        serve(invocation(config, tmp_path))
    for given in ({"serve__token": "s3cret"}, {"ray__address": None}):
        assert serve(invocation(changed(config, **given), tmp_path)) == 0


def test_the_token_stays_out_of_what_a_run_leaves_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TEST_TOKEN", "s3cret")
    for given in ("s3cret", "${oc.env:SLIPSTREAM_TEST_TOKEN}"):
        composed = OmegaConf.create({"serve": {"token": given, "port": 1}})
        assert OmegaConf.to_container(without_token(composed), resolve=True) == {
            "serve": {"token": "(not shown)", "port": 1}
        }
        assert composed.serve.token == "s3cret"
