"""The main of commands that look at the config of a training and train nothing: `rehearse` and `agent-check`."""

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

from configs.schema import Config
from scripts.command.command import Ended, Invocation, Main, leave

Own = TypeVar("Own")
HELP = {"-h", "--help"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigOnly(Generic[Own]):
    """Run `command` on the config of a training, and on words of its own. No run begins, and no folder is left.

    Example:
        ConfigOnly(name="rehearse", description=__doc__, split=split, command=rehearse_run).exit(sys.argv[1:])
    """

    name: str
    """The command's name after `slipstream`."""
    description: str | None
    """The text that --help shows."""
    split: Callable[[Sequence[str]], tuple[Own, list[str]]]
    """Tells the command's own words from the overrides of the config."""
    command: Callable[[Config, Own], Ended]

    def exit(self, words: Sequence[str]) -> NoReturn:
        """Run as the whole of a process, whose signals and streams it takes over."""
        if HELP & set(words):
            sys.stdout.write(self.description or "")
            leave(0)
        own, overrides = self.split(words)

        def command(invocation: Invocation) -> Ended:
            return self.command(invocation.config, own)

        main = Main(name="train", called=self.name, command=command, needed_files=(), may_sweep=False)
        main.exit([*overrides, "dry_run=true"])  # which composes and checks, and makes no folder


def take(words: Sequence[str], names: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of the words NAME=VALUE with these names, and the other words.

    Example: take(["card=H200", "seed=1"], ["card"]) == ({"card": "H200"}, ["seed=1"])
    """
    pairs = [(word, *word.partition("=")) for word in words]
    taken = {name: value for _, name, sign, value in pairs if sign and name in names}
    return taken, [word for word, name, sign, _ in pairs if not (sign and name in names)]
