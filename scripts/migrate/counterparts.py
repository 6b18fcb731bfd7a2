"""Our keys and values for those of another framework.

The names are those of `configs.cli.peers`, the table of which the error for an unknown key is made, too. This module
adds what a table of names cannot say: the arithmetic of batches, of processes and of units, and names of values. The
rules of a framework stand in a file of its own.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from configs.cli.peers import EQUIVALENTS, FRAMEWORKS, Equivalent
from scripts.migrate.settings import Setting, Source, Unknown, Unread


@dataclass(frozen=True, slots=True)
class Here:
    """A counterpart, or several. `why` is told where the meaning differs, or the value was converted.

    Example: Here({"trainer.mini_batches": 4}, "parts of a batch, not their size")
    """

    values: Mapping[str, Any]
    why: str = ""


@dataclass(frozen=True, slots=True)
class Nothing:
    """No counterpart, and the reason."""

    why: str


@dataclass(frozen=True, slots=True)
class Covered:
    """Nothing to set: what theirs says is the case here, or is said by another of their keys."""


Answer = Here | Nothing | Covered
Theirs = Mapping[str, Any]
"""The settings of their file by key, after the framework's own defaults."""
Rule = Callable[[Any, Theirs], Answer]
SOME_MODEL = "ORG/MODEL"
"""Stands for a model that the file does not name, or that is not on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of a framework.

    Example: Rules(rules={"trainer.save_freq": never_is_zero("checkpoint.every")}, nothing={"trainer.device": "..."})
    """

    rules: Mapping[str, Rule]
    """Rules by their full keys. They come before the table of names."""
    nothing: Mapping[str, str]
    """Reasons for which keys of these beginnings have no counterpart, the longest first."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that their framework takes where the file is silent, of keys whose default differs here. It may be the
    same for keys in which others are counted."""
    other_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Other names of keys with a default, which does not count where the file uses one of them."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Our keys that every run coming from there needs, such as the columns of its data."""
    own_code: Mapping[str, Rule] = field(default_factory=dict)
    """Rules for functions of the user, which no value tells: it may be Unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A key of theirs and what became of it."""

    setting: Setting
    here: Mapping[str, Any]
    """Empty where there is no counterpart."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """Our overrides, and what is to be told of each key of theirs."""

    overrides: Mapping[str, Any]
    told: tuple[Told, ...]
    to_do: tuple[str, ...] = ()
    """Sentences on what is left to set in the command."""


def translate(source: Source, rules: Rules) -> Translation:
    """Return our keys for all settings of a source."""
    own = {setting.key: setting.value for setting in source.settings}
    silent = [key for key in rules.defaults if own.keys().isdisjoint((key, *rules.other_names.get(key, ())))]
    defaults = {key: rules.defaults[key] for key in silent}
    theirs: dict[str, Any] = {**defaults, **own}
    overrides: dict[str, Any] = dict(rules.always)
    told: list[Told] = []
    for key, value in theirs.items():
        setting = Setting(key, value)
        match _answer(setting, theirs, source.framework, rules):
            case Here(values=values, why=why):
                overrides |= values
                told.append(Told(setting=setting, here=values, why=_origin(key, own, source) + why))
            case Nothing(why=why):
                told.append(Told(setting=setting, here={}, why=_origin(key, own, source) + why))
            case Covered():
                pass
    return Translation(overrides=overrides, told=tuple(told), to_do=tuple(_fill_gaps(overrides)))


def _origin(key: str, own: Theirs, source: Source) -> str:
    return "" if key in own else f"the default of {FRAMEWORKS[source.framework]}; "


def _fill_gaps(overrides: dict[str, Any]) -> Iterator[str]:
    """Set what a training of a pretrained model must have, and yield what is left to do."""
    if "model.path" not in overrides:
        overrides["model.path"] = SOME_MODEL
        yield "model.path: the model is not named in the file"
    if "data.train_files" not in overrides:
        overrides["data.train_files"] = "TRAIN_FILES"
        yield "data.train_files: the data is not named in the file"
    if "data.val_files" not in overrides:
        overrides["data.val_files"] = "none"
        yield "data.val_files: nothing is held out; data.val_share=0.05 in its place holds out a part"


def _answer(setting: Setting, theirs: Theirs, framework: str, rules: Rules) -> Answer:
    key, value = setting.key, setting.value
    if isinstance(value, Unread):
        return Nothing(value.why)
    if key in rules.own_code:
        return rules.own_code[key](value, theirs)
    if isinstance(value, Unknown):
        return Nothing(f"its value is known only when the file runs: {_named(key, framework)}")
    if (rule := rules.rules.get(key)) is not None:
        needed = [each for each in theirs.values() if isinstance(each, Unknown)]
        try:
            return rule(value, theirs)
        except (TypeError, ValueError, ZeroDivisionError) as error:
            reason = "other values that it needs are known only when the file runs" if needed else str(error)
            return Nothing(f"cannot be converted: {reason}")
    if (equivalent := _equivalent(key, framework)) is not None:
        if equivalent.is_sentence:
            return Nothing(equivalent.here)
        here, _, fixed = equivalent.here.partition("=")
        return Here({here: fixed or value}, equivalent.differs)
    for start in sorted(rules.nothing, key=len, reverse=True):
        if key.startswith(start):
            return Nothing(rules.nothing[start])
    return Nothing("there is no such setting")


def _equivalent(key: str, framework: str) -> Equivalent | None:
    return next((equivalent for equivalent in EQUIVALENTS if key in equivalent.named[framework]), None)


def _named(key: str, framework: str) -> str:
    equivalent = _equivalent(key, framework)
    return f"set {equivalent.here} by hand" if equivalent is not None and not equivalent.is_sentence else "see --help"


# -- rules that several frameworks have --------------------------------------------------------------------------------

CHAT = {"data.prompt_key": "prompt", "data.prompt_template": "{question}", "data.chat_template": True}
"""Our keys for rows whose column `prompt` holds messages."""
NO_TRACKER = (None, "none", "all", "console", "file", "jsonl")
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
"""Names of schedules as transformers has them."""


def renamed(here: str, values: Mapping[Any, Any], why: str = "") -> Rule:
    """Return a rule that maps values by name. Texts compare with dashes as underscores, and in lower case."""

    def rule(value: Any, theirs: Theirs) -> Answer:
        plain = value.replace("-", "_").lower() if isinstance(value, str) else value
        if plain not in values:
            return Nothing(f"{here} has no such value")
        return Here({here: values[plain]}, why)

    return rule


def under_the_name(here: str, why: str = "") -> Rule:
    return lambda value, theirs: Here({here: value}, why)


def never_is_zero(here: str) -> Rule:
    """Return a rule for a frequency, of which theirs is -1 (or 0) for never, and ours 0."""
    return lambda value, theirs: Here({here: max(0, int(value))}, "0 is never" if int(value) < 0 else "")


def only_if(switch: str, rule: Rule, default: bool = False, *, is_on: Any = None) -> Rule:
    """Return a rule for what counts only where a switch of theirs is on, or has the value `is_on`."""

    def ruled(value: Any, theirs: Theirs) -> Answer:
        setting = theirs.get(switch, default)
        return rule(value, theirs) if (setting if is_on is None else setting == is_on) else Covered()

    return ruled


def covered(value: Any, theirs: Theirs) -> Answer:
    return Covered()


def covered_if(is_so: Callable[[Any], object], why: str) -> Rule:
    """Return a rule for values of which some say what is the case here, and the others have no counterpart."""
    return lambda value, theirs: Covered() if is_so(value) else Nothing(why)


def only(value: Any, why: str) -> Rule:
    """Return a rule for a choice that is made here: this value."""
    return covered_if(lambda theirs: theirs == value, why)


def epochs(*steps: str) -> Rule:
    """Return a rule for a number of epochs, which counts where none of these keys says how many steps are taken."""
    why = "set trainer.total_steps: epochs x rows / trainer.prompts_per_step, which dry_run=true shows"
    return lambda value, theirs: Covered() if any((theirs.get(key) or -1) != -1 for key in steps) else Nothing(why)


def sinks(value: Any, theirs: Theirs) -> Answer:
    """Translate the names of trackers. The file jsonl is always among ours, and the console needs none."""
    names = value if isinstance(value, list) else [value]
    known = [name for name in names if name in ("wandb", "tensorboard")]
    others = [str(name) for name in names if name not in (*known, *NO_TRACKER)]
    return Here({"tracking.sinks": ["jsonl", *known]}, f"there is no {', '.join(others)}" if others else "")


def files(here: str) -> Rule:
    def rule(value: Any, theirs: Theirs) -> Answer:
        names = value if isinstance(value, list) else [value]
        return Here({here: ",".join(map(str, names))})

    return rule


def on_or_off(here: str, on: Any, off: Any, why: str) -> Rule:
    return lambda value, theirs: Here({here: on if value else off}, why)


def reward_by_hand(signature: str, call: str) -> Rule:
    """Return a rule for a reward of the user's own, whose arguments differ. It is neither imported nor wrapped here."""

    def rule(value: Any, theirs: Theirs) -> Answer:
        wrapper = f"def reward(prompt, text): return {call}"
        return Nothing(
            f"rollout.reward takes (prompt, text), and theirs {signature}: put `{wrapper}` into a file "
            "my_reward.py beside yours, and add rollout.reward=my_reward:reward"
        )

    return rule


def halves(num_gpus: int, per_replica: int) -> tuple[int, int, str]:
    """Return (num_ranks, num_replicas, why) of GPUs on which theirs trains and generates by turns."""
    num_ranks = max(1, num_gpus // 2)
    num_replicas = max(1, (num_gpus - num_ranks) // per_replica)
    why = f"theirs shares {num_gpus} GPUs between training and generation; here each has its own, so they are halved"
    return num_ranks, num_replicas, why


def number(theirs: Theirs, key: str, default: float | None = None) -> int:
    """Return a whole number of theirs. Raises ValueError where it is not known."""
    value = theirs.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} is not known")
    return int(value)


def parts(batch: int, mini_batch: int) -> Iterator[tuple[str, int]]:
    """Yield trainer.mini_batches. Raises ValueError for mini-batches that do not fill a batch."""
    if mini_batch <= 0 or batch % mini_batch:
        raise ValueError(f"mini-batches of {mini_batch} do not divide a batch of {batch}; set trainer.mini_batches")
    yield "trainer.mini_batches", batch // mini_batch
