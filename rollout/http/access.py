"""Access to a server: the names, web pages and tokens with which it may be called."""

import hmac
import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Scope

from configs.serve import ServeConfig, host_names, is_loopback
from rollout.http.answers import GENERATION, PROBES, error_answer
from rollout.http.token import Token

HOST = re.compile(r"(?:([\w.-]+)|\[([0-9a-f:.]+)\])(?::\d{0,5})?", re.ASCII | re.IGNORECASE)
"""A host of a URL, with or without a port (RFC 9110, 7.2). Anything else may be read in several ways: as a host by one
program, and by the next one as a path or a user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Decides who may call the servers of one run.

    A web page can send requests to loopback addresses, with an `Origin` of its own. With DNS rebinding it can even
    read the answers, and then `Host` has its name. So both must be names that the user knows, on every route.
    """

    token: Token | None
    """The server's token; None asks for none."""
    names: Collection[str]
    """The host names that are allowed, in lower case."""
    on_loopback: bool
    """True allows only loopback addresses as hosts. Elsewhere any address is allowed, since no page can rebind one."""

    @classmethod
    def of(cls, serve: ServeConfig, token: Token | None, *, on_loopback: bool) -> "Access":
        names = host_names(serve.allowed_hosts) | {"localhost", serve.host.lower()}
        return cls(token=token, names=names, on_loopback=on_loopback)

    def admits(self, path: str, headers: Headers) -> bool:
        """Return whether a request has the token that its route needs. Generation needs one only if the user gave it,
        as with `vllm serve`."""
        if self.token is None or path in PROBES or (path in GENERATION and not self.token.is_configured):
            return True
        return self._has_token(headers)

    def knows(self, host: str) -> bool:
        """Return whether a client may call the server by this name or address, which may have a port."""
        if (match := HOST.fullmatch(host)) is None:
            return False
        name = (match[1] or match[2]).lower().removesuffix(".")
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self.names
        return is_loopback(name) or name in self.names or not self.on_loopback

    def refusal(self, scope: Scope) -> JSONResponse | None:
        """Return a 401 or 403 for a request that is not allowed, judged by its path and headers."""
        headers, path = Headers(scope=scope), scope["path"]
        known = "loopback names, serve.host and serve.allowed_hosts are"
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not HOST.fullmatch(hosts[0]):
            return error_answer(path, 400, f"Host {ascii(', '.join(hosts))}: a request has one, a name or an address")
        if not self.knows(hosts[0]):
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
        scheme, _, value = headers.get("authorization", "").partition(" ")
        # Comparing takes as long for a good guess as for a bad one, so that its time tells nothing about the token.
        return hmac.compare_digest(value.strip().encode(), self.token.value.encode()) and scheme.lower() == "bearer"
