"""Keys of the HTTP server."""

import ipaddress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    enabled: bool = False
    """Training runs only: serve the control routes (pause, resume, abort, versions, metrics) during the run."""
    host: str = "127.0.0.1"
    """Address that the gateway listens on. Any but a loopback address needs serve.token."""
    port: int = 8000
    """Port that the gateway listens on; 0 takes a free one."""
    token: str | None = None
    """Bearer token that control routes ask for (`${oc.env:NAME}`: from the environment); null asks for none."""
    route_timeout_s: float = 10.0
    """Seconds that a request waits for a replica in service (then 503), and for a connection to it (then 502)."""

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
