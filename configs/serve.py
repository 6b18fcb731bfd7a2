"""Keys of the HTTP server."""

import ipaddress
from dataclasses import dataclass

ADDRESS_FILE = "serving.url"
"""In the run folder of `serve`, while it answers: the address of the gateway."""
TOKEN_ENV = "SLIPSTREAM_TOKEN"
"""Environment variable with the token. No key holds it: a command line shows in `ps`, in the run folder and in W&B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    enabled: bool = False
    """Training runs only: serve the control routes (pause, resume, abort, versions, metrics) during the run."""
    host: str = "127.0.0.1"
    """Address that the gateway listens on. Any but a loopback address needs a token that is set."""
    port: int = 8000
    """Port that the gateway listens on; 0 takes a free one."""
    token_file: str | None = None
    """File with the bearer token; null takes the one of the environment, SLIPSTREAM_TOKEN, or makes one for the control
    routes, which is in control.token of the run folder."""
    require_token: bool = True
    """False opens the control routes of a loopback address to every process on the machine; web pages stay out."""
    allowed_hosts: str | None = None
    """Names, separated by commas, by which clients and same-origin pages call the server, besides the loopback names
    and serve.host. Names only, without a scheme, a port or brackets."""
    max_pause_s: float = 600.0
    """Training runs only: seconds that clients may pause the run, after which it is resumed."""
    max_connections: int = 4096
    """Requests under way at one server; one more is answered with 503."""
    max_header_bytes: int = 65536
    """Size of a request's line and headers (then 400)."""
    max_body_mb: int = 16
    """Size of a request's body in MiB (then 413)."""
    route_timeout_s: float = 10.0
    """Seconds that a request waits for a replica in service (then 503), and for a connection to it (then 502)."""

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)


def host_names(allowed_hosts: str | None) -> frozenset[str]:
    """The names of serve.allowed_hosts, in lower case."""
    return frozenset(name.strip().lower() for name in (allowed_hosts or "").split(",")) - {""}


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
