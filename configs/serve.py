"""Keys of the HTTP server."""

import ipaddress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    enabled: bool = False
    """Training runs only: serve the control routes (pause, resume, abort, versions, metrics) beside the run."""
    host: str = "127.0.0.1"
    """Address that the gateway listens on. Any but a loopback address needs serve.token."""
    port: int = 8000
    """Port that the gateway listens on; 0 takes a free one."""
    token: str | None = None
    """Bearer token that the control routes ask for; null asks for none. `${oc.env:NAME}` takes it from the
    environment."""


def serve_problems(serve: ServeConfig) -> list[tuple[str, object, str]]:
    """(key, value, what is allowed) of what cannot work."""
    if serve.token is not None:
        if serve.token.strip() and serve.token.isascii() and serve.token.isprintable():
            return []
        return [("serve.token", "(not shown)", "must be printable ASCII, and not empty")]
    if not is_loopback(serve.host):
        return [
            ("serve.token", None, f"serve.host={serve.host} is not a loopback address: control routes need a token")
        ]
    return []


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
