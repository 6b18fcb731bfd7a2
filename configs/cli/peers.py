"""The names of our keys in other frameworks, for the error of an unknown key and for the tables of docs/migrating.md.

Names are those of current sources, as far as these were read; older names, such as OpenRLHF's flat ones, are as their
users know them. They are the rows of peers.tsv, with blanks between the names of one key, the newest first.
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalent:
    """Example: Equivalent(here="algorithm.group_size", named={"verl": (), "trl": ("num_generations",), ...})"""

    here: str
    """Our key, with its value where the other has a name for the value; or what we do instead, as a sentence."""
    named: Mapping[str, tuple[str, ...]]
    """Its names in each of FRAMEWORKS."""
    differs: str
    """The difference in meaning, where there is one."""

    @property
    def is_sentence(self) -> bool:
        return " " in self.here


FRAMEWORKS = {
    "verl": "verl",
    "skyrl": "SkyRL",
    "prime_rl": "prime-rl",
    "areal": "AReaL",
    "openrlhf": "OpenRLHF",
    "trl": "TRL",
}


def _rows() -> Iterator[Equivalent]:
    """Read peers.tsv, whose columns are `here`, the FRAMEWORKS and `differs`."""
    with Path(__file__).with_suffix(".tsv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            named = {framework: tuple(row[framework].split()) for framework in FRAMEWORKS}
            yield Equivalent(here=row["here"], named=named, differs=row["differs"])


EQUIVALENTS = tuple(_rows())


def equivalents(key: str) -> list[tuple[Equivalent, str, str]]:
    """(equivalent, framework, its full key) of what other frameworks call `key`; also without its first parts
    (`rollout.n` is verl's `actor_rollout_ref.rollout.n`), or under a section that the other has not. Of a single word
    only where all who use it mean the same."""
    named = [
        (equivalent, shown, theirs)
        for equivalent in EQUIVALENTS
        for framework, shown in FRAMEWORKS.items()
        for theirs in equivalent.named[framework]
    ]
    exact = [match for match in named if match[2] == key]
    if exact:
        return exact
    ending = [match for match in named if match[2].endswith(f".{key}")]
    if "." not in key:
        return ending if len({equivalent.here for equivalent, _, _ in ending}) == 1 else []
    return ending or [match for match in named if match[2] == key.rpartition(".")[2]]
