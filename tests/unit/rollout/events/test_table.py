"""The table in docs/observe.md has every kind of event with its fields, and no other."""

import re
from dataclasses import fields

from rollout.events.event import Event
from rollout.events.kinds import OfEpisode
from tests.support.paths import ROOT
from trainer.tracking.events.kinds import KINDS

ROW = re.compile(r"^\| `(\w+)`( \*)? \| (.*?)\s*\| (driver|replica|agent worker) \|", re.MULTILINE)


def own_fields(kind: type[Event]) -> list[str]:
    inherited = [field.name for field in fields(OfEpisode)] if issubclass(kind, OfEpisode) else []
    return [field.name for field in fields(kind) if field.name not in inherited]


def test_the_table_of_events_is_the_code() -> None:
    rows = ROW.findall((ROOT / "docs" / "observe.md").read_text(encoding="utf-8"))
    shown = {name: (bool(star), re.findall(r"`(\w+)`", cells)) for name, star, cells, _ in rows}
    assert shown == {name: (kind.is_frequent, own_fields(kind)) for name, kind in KINDS.items()}
    assert len(rows) == len(shown) > 30
