"""Who may call a server: by which name, from which web page, and with which token."""

import hmac
import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Scope

from configs.serve import ServeConfig, host_names, is_loopback
from rollout.http.answers import GENERATION, PROBES, error_answer
from rollout.http.token import Token


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may call the servers of one run.

    A web page can send requests to loopback addresses, with an `Origin` of its own. With DNS rebinding it can even
    read the answers, and then `Host` has its name. So both must be names that the user knows, on every route.
    """

    token: Token | None
    """None asks for none."""
    names: Collection[str]
    """Host names that are allowed, in lower case."""
    on_loopback: bool
    """Then only loopback addresses are allowed as hosts; else any: no page can rebind an address."""

    @classmethod
    def of(cls, serve: ServeConfig, token: Token | None, *, on_loopback: bool) -> "Access":
        names = host_names(serve.allowed_hosts) | {"localhost", serve.host.lower()}
        return cls(token=token, names=names, on_loopback=on_loopback)

    def is_open(self, path: str) -> bool:
        """Whether the route needs no token. Generation does when the user gave one, as with `vllm serve`."""
        if self.token is None or path in PROBES:
            return True
        return path in GENERATION and not self.token.is_given

    def admits(self, path: str, headers: Headers) -> bool:
        """Whether a request that comes from where it may has the token that its route needs."""
        return self.is_open(path) or self._has_token(headers)

    def knows(self, host: str) -> bool:
        """Whether a client may call the server by this name or address, which may have a port."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        name = name.removesuffix(".")
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self.names
        return is_loopback(name) or name in self.names or not self.on_loopback

    def refusal(self, scope: Scope) -> JSONResponse | None:
        """A 401 or 403 for a request that is not allowed, which its path and its headers tell."""
        headers, path = Headers(scope=scope), scope["path"]
        known = "loopback names, serve.host and serve.allowed_hosts are"
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not self.knows(hosts[0]):
            return error_answer(path, 403, f"Host {ascii(', '.join(hosts))} is not allowed: {known}")
        for origin in origins:
            if not self.knows(origin.partition("://")[2]):
                return error_answer(path, 403, f"a page of Origin {ascii(origin)} may not call this: {known} allowed")
        if self.admits(path, headers):
            return None
        answer = error_answer(path, 401, f"{path} needs 'Authorization: Bearer TOKEN'; see docs/serving.md")
        answer.headers["www-authenticate"] = "Bearer"
        return answer

    def _has_token(self, headers: Headers) -> bool:
        assert self.token is not None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # This takes as long for a good guess as for a bad one.
        return hmac.compare_digest(given.strip().encode(), self.token.value.encode()) and scheme.lower() == "bearer"
