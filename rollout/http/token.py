"""The bearer token of a server: given by the user, or made for one run."""

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
    is_given: bool
    """A token that the user gave guards generation too; one that was made guards control only."""


def given_token(serve: ServeConfig) -> Token | None:
    """That of serve.token_file, or else of the environment. Raises ConfigError when it cannot be used."""
    if serve.token_file is not None:
        where = f"serve.token_file={serve.token_file}"
        try:
            value = Path(serve.token_file).expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: cannot be read: {error}") from None
    else:
        where = TOKEN_ENV
        if (given := os.environ.get(TOKEN_ENV)) is None:
            return None
        value = given.strip()
    if not (value and value.isascii() and value.isprintable()):
        raise ConfigError(f"{where}: the token must be printable ASCII, and not empty")
    return Token(value, is_given=True)


@contextmanager
def control_token(serve: ServeConfig, run_dir: Path) -> Iterator[Token | None]:
    """The token that was given; else one that is made, and in TOKEN_FILE of the run folder until the block ends. None
    with serve.require_token=false. Raises ConfigError."""
    given = given_token(serve)
    if given is not None or not serve.require_token:
        yield given
        return
    path, made = run_dir / TOKEN_FILE, Token(secrets.token_urlsafe(32), is_given=False)
    path.unlink(missing_ok=True)  # of a run that was killed
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(made.value + "\n")
    try:
        yield made
    finally:
        path.unlink(missing_ok=True)


def usage(token: Token | None, serve: ServeConfig, run_dir: Path) -> str:
    """How a client gets the token, for the console."""
    if token is None:
        return "control routes ask for no token (serve.require_token=false)"
    where = f"$(cat {run_dir / TOKEN_FILE})" if not token.is_given else f"${TOKEN_ENV}"
    where = where if serve.token_file is None else f"$(cat {serve.token_file})"
    what = "all routes ask" if token.is_given else "control routes ask"
    return f'{what} for a token: curl -H "Authorization: Bearer {where}"'
