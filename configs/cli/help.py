"""The texts of `--help`: all groups and sections, or one of them with the values that the command line composes."""

import difflib
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from configs import load
from configs.cli.compose import ComposedJob
from configs.schema import Config
from configs.validate import ConfigError

WIDTH = 80
COMMANDS = {
    "train": ("[KEY=VALUE ...]", "Trains a model by fully-async reinforcement learning."),
    "sft": ("[KEY=VALUE ...]", "Trains a model on conversations, by supervised fine-tuning."),
    "evaluate": ("[FOLDER] [KEY=VALUE ...]", "Evaluates a model, or that of a run in FOLDER, on held-out data."),
    "serve": ("[KEY=VALUE ...]", "Serves a model over HTTP until Ctrl-C."),
}
"""Each command with its arguments and what it does."""
GROUPS = {
    "recipe": "what is learned: data, reward, algorithm, steps",
    "model": "the model; --help model lists its keys, too",
    "sizes": "what suits the machine; follows model=NAME, overrides the recipe",
    "sft": "what suits supervised fine-tuning; follows model=NAME, too",
}
"""Choices of many keys at once; their options are the files in configs/GROUP/."""
RUN = "run"
"""The section of the keys that have no dot in their names."""
_END_OF_SENTENCE = re.compile(r"(?<!\bDr)\.(\s|$)")


@dataclass(frozen=True, slots=True)
class Help:
    """The texts of `--help`.

    Example: Help("train", compose_job("train", ["recipe=gsm8k"])).of("trainer")
    """

    command: str
    job: ComposedJob

    def overview(self) -> str:
        arguments, does = COMMANDS[self.command]
        program = f"slipstream {self.command}"
        lines = [
            does,
            "",
            f"  {program} {arguments}",
            *([f'  make {self.command} ARGS="{arguments}"'] if Path("Makefile").is_file() else []),
            f"  {program} --help SECTION    keys of a section, or options of a group",
            f"  {program} --help KEY        all about one key",
            f"  {program} --cfg job         the whole config",
            f"  {program} dry_run=true      check it, say what would start, and stop",
            "",
            "All of them take more KEY=VALUE, and show what these lead to.",
            "Later ones win: schema, model, recipe, sizes, command line.",
            "",
            "Groups: GROUP=OPTION sets many keys at once (* is what this line chooses)",
        ]
        for group in GROUPS:
            if group != "sft" or self.command == "sft":
                lines += ["", *self._group(group)]
        lines += ["", "Sections: SECTION.KEY=VALUE sets one key (run: KEY=VALUE)", ""]
        lines += [f"  {name:<12} {about}" for name, about in sections().items()]
        return "\n".join(lines) + "\n"

    def of(self, topic: str) -> str:
        """Return the help of a section, a group or a key. Raise ConfigError for any other topic."""
        if topic in load.key_docs():
            return "\n".join(self._key(topic, load.key_docs()[topic][1])) + "\n"
        lines: list[str] = []
        if topic in GROUPS:
            lines += self._group(topic)
        if topic in sections():
            chosen = " ".join(f"{group}={option}" for group in GROUPS if (option := self._chosen(group)) is not None)
            lines += [*([""] if lines else []), f"{topic}: {sections()[topic]}", f"Values with {chosen}:"]
            for key, (_, doc) in load.key_docs().items():
                if find_section(key) == topic:
                    lines += ["", *self._key(key, first_sentence(doc))]
        if not lines:
            names = list(dict.fromkeys([*sections(), *GROUPS]))
            near = difflib.get_close_matches(topic, load.key_docs() if "." in topic else names, n=2)
            allowed = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}"
            raise ConfigError(f"--help {topic}: there is no such section, group or key; {allowed}")
        return "\n".join(lines) + "\n"

    def _group(self, group: str) -> Iterator[str]:
        yield f"  {group}: {GROUPS[group]}"
        options, chosen = list_options(group), self._chosen(group)
        if chosen is not None and chosen not in options:
            options = {**options, chosen: "Not one of this project."}
        width = max(11, *map(len, options))
        for option, about in options.items():
            mark = "*" if option == chosen else " "
            yield from _wrapped(f"  {mark} {option:<{width}} {about}", " " * (width + 5))

    def _chosen(self, group: str) -> str | None:
        return self.job.hydra.runtime.choices.get(group)

    def _key(self, key: str, doc: str) -> Iterator[str]:
        # Not resolved: what an interpolation takes from the environment may be a secret.
        value: Any = OmegaConf.to_container(self.job.config, resolve=False)
        for name in key.split("."):
            value = value[name]
        as_json = json.dumps(value, ensure_ascii=False, default=lambda member: member.value)
        yield f"{key} = {value.value if isinstance(value, Enum) else as_json}"
        yield from _wrapped(f"    {doc}", "    ")


def sections() -> Mapping[str, str]:
    """Maps each section to what it is about."""
    names = dict.fromkeys(find_section(key) for key in load.key_docs())
    docs = load.literal_docs(Config)
    return {name: docs.get(name, "The whole: seed, device, dry run, resuming.") for name in names}


def find_section(key: str) -> str:
    return key.partition(".")[0] if "." in key else RUN


def list_options(group: str) -> dict[str, str]:
    """Maps each option to the first sentence of its file."""
    files = sorted((Path(load.__file__).parent / group).glob("*.yaml"))
    return {file.stem: first_sentence(_comment(file)) for file in files}


def first_sentence(text: str) -> str:
    end = _END_OF_SENTENCE.search(text)
    return text if end is None else text[: end.start() + 1]


def _comment(file: Path) -> str:
    lines = file.read_text(encoding="utf-8").splitlines()
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#") and "@package" not in line)


def _wrapped(line: str, indent: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
