"""The bearer token of a server, which the user gives or which is made for one run."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from configs.serve import TOKEN_ENV, ServeConfig
from configs.validate import ConfigError

TOKEN_FILE = "control.token"
"""Name of the file in the run folder, which only the user can read."""


@dataclass(frozen=True, slots=True)
class Token:
    value: str = field(repr=False)
    is_configured: bool
    """True for a token that the user gave: it guards generation too, and one that was made guards control only."""


def configured_token(serve: ServeConfig) -> Token | None:
    """Return the token of serve.token_file, or else of the environment. Raises ConfigError when it cannot be used."""
    if serve.token_file is not None:
        where = f"serve.token_file={serve.token_file}"
        try:
            value = Path(serve.token_file).expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: cannot be read: {error}") from None
    else:
        where = TOKEN_ENV
        if (variable := os.environ.get(TOKEN_ENV)) is None:
            return None
        value = variable.strip()
    if not (value and value.isascii() and value.isprintable()):
        raise ConfigError(f"{where}: the token must be printable ASCII, and not empty")
    return Token(value, is_configured=True)


@contextmanager
def control_token(serve: ServeConfig, run_dir: Path) -> Iterator[Token | None]:
    """Yield the token that was given, or else one that is made, and is in TOKEN_FILE of the run folder until the block
    ends. It is None with serve.require_token=false. Raises ConfigError."""
    token = configured_token(serve)
    if token is not None or not serve.require_token:
        yield token
        return
    path, made = run_dir / TOKEN_FILE, Token(secrets.token_urlsafe(32), is_configured=False)
    path.unlink(missing_ok=True)  # a run that was killed has left its file
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(made.value + "\n")
    try:
        yield made
    finally:
        path.unlink(missing_ok=True)


def usage(token: Token | None, serve: ServeConfig, run_dir: Path) -> str:
    """Return how a client gets the token, for the console."""
    if token is None:
        return "control routes ask for no token (serve.require_token=false)"
    where = f"$(cat {run_dir / TOKEN_FILE})" if not token.is_configured else f"${TOKEN_ENV}"
    where = where if serve.token_file is None else f"$(cat {serve.token_file})"
    what = "all routes ask" if token.is_configured else "control routes ask"
    return f'{what} for a token: curl -H "Authorization: Bearer {where}"'
