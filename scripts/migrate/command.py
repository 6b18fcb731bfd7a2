"""The command `migrate`: reads, translates, has our own checks refuse what they must, and prints."""

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.cli.arguments import quoted
from configs.cli.compose import compose_job
from configs.cli.overrides import check_overrides
from configs.cli.peers import FRAMEWORKS as NAMES
from configs.load import load
from configs.validate import ConfigError
from scripts.migrate import prime_rl, skyrl, trl, verl
from scripts.migrate.counterparts import SOME_MODEL, Rules, Told, Translation, translate
from scripts.migrate.reading import FRAMEWORKS, read
from scripts.migrate.settings import Unknown, Unread, UnreadableError

RULES: Mapping[str, Rules] = {"verl": verl.RULES, "skyrl": skyrl.RULES, "trl": trl.RULES, "prime_rl": prime_rl.RULES}
BASE = ("model=hf",)
"""The choice with which every command begins: theirs train pretrained models."""
MODELS = ("model.path", "teacher.path")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A counterpart that our checks refuse."""

    override: str
    why: str


def main() -> None:
    parser = argparse.ArgumentParser(prog="slipstream migrate", description="Print our command for theirs.")
    parser.add_argument("file", type=Path, help="their script or file; nothing of it is run")
    parser.add_argument(
        "--from", dest="framework", choices=FRAMEWORKS, help="the framework, which is found out if left out"
    )
    options = parser.parse_args()
    try:
        sys.stdout.write(migrated(options.file, None if options.framework is None else FRAMEWORKS[options.framework]))
    except UnreadableError as error:
        sys.exit(f"migrate: {error}")


def migrated(file: Path, framework: str | None = None) -> str:
    """Return the script. Raises UnreadableError."""
    source = read(file, framework)
    translation = translate(source, RULES[source.framework])
    overrides, refusals = composable(translation.overrides)
    head = f"# {NAMES[source.framework]}'s {file.name} as a command of slipstream"
    return "\n".join([head, *_notes(translation, refusals), "", _command(overrides), ""])


def composable(overrides: Mapping[str, Any]) -> tuple[list[str], list[Refusal]]:
    """Return the overrides that our checks let through together, and those that they refuse, with their reasons."""
    words = {key: f"{key}={_text(value)}" for key, value in overrides.items()}
    refusals: list[Refusal] = []
    while words and (problems := _problems(list(words.values()))):
        refused = {key: why for key in words for why in problems if why.startswith((f"{key}=", f"{key}:", f"{key} "))}
        if not refused:  # a check that begins with a key that is not set here: the last of those that it names goes
            named = [key for key in words if any(key in why for why in problems)] or list(words)
            refused = {named[-1]: problems[0]}
        refusals += [Refusal(override=words.pop(key), why=why) for key, why in refused.items()]
    return list(words.values()), refusals


def _problems(overrides: Sequence[str]) -> list[str]:
    """Return what our checks say of a command line, a line for each problem. Data and models need not be there."""
    problems: list[str] = []
    words = [_of_any_model(override) for override in overrides]
    for word in words:
        try:
            check_overrides([word])
        except ConfigError as error:
            problems.append(str(error).splitlines()[0])
    if problems:
        return problems
    try:
        line = [*BASE, *words, "dry_run=true"]
        load(compose_job("train", line).config, overrides=line)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def _of_any_model(override: str) -> str:
    """Return an override with a name of the hub in place of a model that is not on this machine."""
    key, _, path = override.partition("=")
    is_here = os.path.isfile(os.path.join(os.path.expanduser(path.strip('"')), "config.json"))
    return override if is_here or key not in MODELS else f"{key}={SOME_MODEL}"


def _text(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value).removesuffix(".0")
        case list():
            return f"[{','.join(map(_text, value))}]"
        case dict():
            return "{" + ",".join(f"{name}:{_text(inner)}" for name, inner in value.items()) + "}"
    return quoted(str(value))


def _command(overrides: Sequence[str]) -> str:
    words = [*BASE, *overrides]
    return " \\\n  ".join(["slipstream train", *map(shlex.quote, words)])


def _notes(translation: Translation, refusals: Sequence[Refusal]) -> Iterator[str]:
    refused = {refusal.override.partition("=")[0] for refusal in refusals}
    converted = [told for told in translation.told if told.here and told.why and not refused.issuperset(told.here)]
    without = [told for told in translation.told if not told.here]
    yield from _section("What means something else here, or was converted", map(_converted, converted))
    yield from _section("Without a counterpart", map(_without, without))
    yield from _section("To do by hand", iter(translation.to_do))
    yield from _section("Refused by our checks, and left out", (f"{each.override}: {each.why}" for each in refusals))


def _converted(told: Told) -> str:
    here = " ".join(f"{key}={_text(value)}" for key, value in told.here.items())
    return f"{told.setting.key}={_shown(told.setting.value)} is {here}: {told.why.removesuffix('; ')}"


def _without(told: Told) -> str:
    if isinstance(told.setting.value, Unread):
        return f"{told.setting.key}: {told.why}"
    return f"{told.setting.key}={_shown(told.setting.value)}: {told.why}"


def _shown(value: Any) -> str:
    return value.text if isinstance(value, Unknown) else _text(value)


def _section(title: str, lines: Iterator[str]) -> Iterator[str]:
    found = [" ".join(line.split()) for line in lines]
    if found:
        yield f"#\n# {title}:"
        yield from (f"#   {line}" for line in found)
