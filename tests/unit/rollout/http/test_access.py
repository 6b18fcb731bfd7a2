"""Access to the routes of a server: by name, from a web page, with a token."""

import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse

from configs.checks.sections import serve_problems
from configs.schema import Config, Device, ServeConfig
from configs.serve import TOKEN_ENV
from configs.validate import ConfigError
from rollout.http.access import HOST, Access
from rollout.http.answers import GENERATION, PROBES
from rollout.http.guard import Guard
from rollout.http.replica_app import replica_app
from rollout.http.token import TOKEN_FILE, Token, control_token
from rollout.replica.replica import RolloutReplica
from scripts.serve import serve
from tests.support.compose import changed, invocation, resolve
from tests.support.fakes import ClockedEngine
from tests.support.http_clients import client_of, make_replica

MADE, GIVEN = Token("s3cret", is_configured=False), Token("s3cret", is_configured=True)
BEARER = {"authorization": "Bearer s3cret"}


@pytest.fixture(autouse=True)
def no_token_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_ENV, raising=False)


@asynccontextmanager
async def client_with(token: Token | None, **serve: Any) -> AsyncIterator[tuple[RolloutReplica, httpx.AsyncClient]]:
    """A replica, whose engine answers everything that is not ours."""
    config = ServeConfig(**serve)
    access = Access.of(config, token, on_loopback=config.is_loopback)
    replica = make_replica(ClockedEngine())
    await replica.tag_loaded(3)
    async with client_of(Guard(replica_app(replica, PlainTextResponse("the engine's")), config, access)) as client:
        client.base_url = "http://127.0.0.1:8000"
        yield replica, client


CONTROL = [("POST", "/pause"), ("POST", "/resume"), ("GET", "/is_paused"), ("POST", "/v1/pause")]
CONTROL += [("POST", "/v1/resume"), ("GET", "/v1/is_paused"), ("POST", "/v1/abort_requests")]
CONTROL += [("GET", "/docs"), ("POST", "/v1/load_lora_adapter"), ("POST", "//pause"), ("POST", "/pause/")]


@pytest.mark.parametrize("token", [MADE, GIVEN], ids=["made", "given"])
async def test_control_needs_the_token_and_generation_only_one_that_was_given(token: Token) -> None:
    async with client_with(token) as (replica, client):
        for method, path in CONTROL:
            for wrong in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
                refused = await client.request(method, path, headers=wrong)
                assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer"), path
        assert not replica.is_paused()
        for path in PROBES:
            assert (await client.get(path)).status_code == 200, path
        for path, method in GENERATION.items():
            answer = await client.request(method, path, headers={"authorization": "Bearer EMPTY"})
            assert answer.status_code == (401 if token.is_configured else 200), path
            assert (await client.request(method, path, headers=BEARER)).text == "the engine's"
        await client.post("/pause", headers={"authorization": "bearer s3cret"})
        assert replica.is_paused()


@pytest.mark.parametrize("sent", ["s3cret", "s3cre", "s3creT", "x3cret", "", "s3cret2", "s", "\u00e9"])
def test_a_token_is_compared_as_a_whole_however_much_of_it_was_guessed(
    sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[bytes, bytes]] = []

    class Watched(str):
        """A text that tells when it is compared, or looked into, by itself."""

        def _refuse(self, *others: object) -> bool:
            raise AssertionError("the token is compared in a time that depends on the guess")

        __eq__ = __ne__ = __contains__ = startswith = endswith = _refuse  # type: ignore[assignment]
        __hash__ = str.__hash__

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return left == right

    monkeypatch.setattr("rollout.http.access.hmac.compare_digest", compare)
    access = Access.of(ServeConfig(), Token(Watched("s3cret"), is_configured=True), on_loopback=True)
    headers = Headers(raw=[(b"authorization", b"Bearer " + sent.encode("latin-1"))])
    assert access.admits("/pause", headers) == (sent == "s3cret")
    assert compared == [(sent.encode(), b"s3cret")]


async def test_without_a_token_the_routes_are_open_but_not_to_web_pages() -> None:
    async with client_with(None) as (replica, client):
        page = {"origin": "http://evil.example", "content-type": "text/plain"}
        assert (await client.post("/pause", headers=page, content="x")).status_code == 403
        assert not replica.is_paused()
        await client.post("/pause")
        assert replica.is_paused()


HOSTS = {
    "127.0.0.1:8000": True,
    "localhost:8000": True,
    "LOCALHOST.": True,
    "[::1]:8000": True,
    "127.0.0.2": True,
    "evil.example": False,
    "evil.example:8000": False,
    "localhost.evil.example": False,
    "localhost@evil.example": False,
    "evil.example@127.0.0.1": False,
    "localhost/evil": False,
    "localhost/pause?mode=keep&x=": False,
    "localhost#x": False,
    "localhost?x": False,
    "[::1": False,
    "localhost:80:80": False,
    "10.0.0.9": False,
    "": False,
    "a.example": True,
    "b.example:1": True,
}
"""Names of a server on loopback, and whether clients may use them, with serve.allowed_hosts="a.example, B.example" """


@pytest.mark.parametrize(("host", "allowed"), HOSTS.items())
@pytest.mark.parametrize("path", ["/pause", "/health", "/v1/completions"])
async def test_only_known_names_reach_any_route_as_host_or_as_origin(host: str, allowed: bool, path: str) -> None:
    """A page of a rebound name sends its own name as the host, and any other page as the origin."""
    async with client_with(MADE, allowed_hosts="a.example, B.example") as (replica, client):
        method = "GET" if path == "/health" else "POST"
        by_host = (await client.request(method, path, headers={"host": host} | BEARER)).status_code
        by_origin = (await client.request(method, path, headers={"origin": f"https://{host}"} | BEARER)).status_code
        assert by_origin == (200 if allowed else 403)
        assert by_host == (200 if allowed else 403 if HOST.fullmatch(host) else 400)
        assert replica.is_paused() == (allowed and path == "/pause")


async def test_of_two_hosts_none_counts() -> None:
    async with client_with(MADE) as (replica, client):
        both = [("host", "127.0.0.1"), ("host", "evil.example"), *BEARER.items()]
        for headers in (both, list(reversed(both))):
            assert (await client.post("/pause", headers=headers)).status_code == 400
        assert not replica.is_paused()


async def test_what_is_refused_is_told_in_the_form_of_the_route() -> None:
    async with client_with(GIVEN) as (_, client):
        for headers, status in (({"origin": "null"}, 403), ({}, 401)):
            openai = (await client.post("/v1/completions", headers=headers)).json()["error"]
            assert (openai["code"], openai["type"]) == (status, "invalid_request_error")
            assert isinstance((await client.post("/pause", headers=headers)).json()["error"], str)


async def test_beyond_loopback_any_address_is_known_and_names_are_not() -> None:
    async with client_with(GIVEN, host="0.0.0.0") as (_, client):
        for host, status in (("10.0.0.9:8000", 200), ("[fe80::1]", 200), ("evil.example", 403)):
            assert (await client.get("/health", headers={"host": host})).status_code == status, host


def test_a_token_is_made_in_a_file_that_only_its_user_can_read(tmp_path: Path) -> None:
    tokens: set[str] = set()
    path = tmp_path / TOKEN_FILE
    path.write_text("of a run that was killed")
    for _ in range(2):
        with control_token(ServeConfig(), tmp_path) as token:
            assert token is not None and not token.is_configured and len(token.value) >= 32
            assert token.value not in repr(token)
            assert (path.read_text().strip(), stat.S_IMODE(path.stat().st_mode)) == (token.value, 0o600)
            tokens.add(token.value)
        assert not path.exists()
    assert len(tokens) == 2
    with control_token(ServeConfig(require_token=False), tmp_path) as token:
        assert token is None and not path.exists()


def test_a_token_is_given_in_the_environment_or_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENV, "of the environment")
    file = tmp_path / "token"
    file.write_text("of the file\n")
    for options, expected in (({}, "of the environment"), ({"token_file": str(file)}, "of the file")):
        with control_token(ServeConfig(**options), tmp_path) as token:
            assert token == Token(expected, is_configured=True)
    assert not (tmp_path / TOKEN_FILE).exists()
    monkeypatch.setenv(TOKEN_ENV, "of a file\n")
    with control_token(ServeConfig(), tmp_path) as token:
        assert token == Token("of a file", is_configured=True)
    for bad in ("", "  ", "sch\u00f6n", "two\nlines"):
        monkeypatch.setenv(TOKEN_ENV, bad)
        with pytest.raises(ConfigError, match=f"^{TOKEN_ENV}: the token must be printable"):
            control_token(ServeConfig(), tmp_path).__enter__()


def test_a_token_is_required_to_listen_beyond_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lines(**serve: Any) -> list[str]:
        config = Config(serve=ServeConfig(**serve))
        return [problem.line(config) for problem in serve_problems(config)]

    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert not lines(host=host), host
    for host in ("0.0.0.0", "::", "192.168.0.7", "example.org"):
        [line] = lines(host=host)
        assert line.startswith(f"serve.host={host}: is not a loopback address: needs a token")
    monkeypatch.setenv(TOKEN_ENV, "s3cret")
    assert not lines(host="0.0.0.0")
    [line] = lines(host="0.0.0.0", require_token=False)
    assert line.startswith("serve.require_token=False: ")
    assert not lines(allowed_hosts="a.example, fe80::1,10.0.0.9,")
    for wrong in ("https://a.example", "a.example:8000", "[::1]", "a.example/"):
        [line] = lines(allowed_hosts=f"b.example, {wrong}")
        assert line.endswith(f", {wrong}: {wrong!r} must be a name or an address: no scheme, port or brackets")
    assert lines(token_file=str(tmp_path / "none")) == [f"serve.token_file={tmp_path}/none: no such file"]


def test_a_token_is_required_where_replicas_listen_beyond_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replica of a cluster listens on its node's address. The command is refused before anything starts."""
    config = changed(resolve(), ray__address="10.0.0.1:6379", device=Device.cpu, dry_run=True)
    with pytest.raises(
        ConfigError, match=r"serve\.token_file=None: with ray\.address=10\.0\.0\.1:6379 .* need a token"
    ):
        serve(invocation(config, tmp_path))
    assert serve(invocation(changed(config, ray__address=None), tmp_path)).exit_code == 0
    monkeypatch.setenv(TOKEN_ENV, "s3cret")
    assert serve(invocation(config, tmp_path)).exit_code == 0
