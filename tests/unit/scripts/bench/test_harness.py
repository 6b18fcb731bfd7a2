"""The harness of the benchmarks: arms in turns, medians, ratios of neighbours, and the table."""

import asyncio

import pytest

from scripts.bench.harness import Runs, make_parser, run_parts, take_turns


def test_arms_take_turns_the_first_of_each_repetition_another_and_warm_ups_do_not_count() -> None:
    calls: list[tuple[str, int]] = []
    seconds = {"slow": 10.0, "fast": 1.0}

    def run(name: str, repetition: int) -> dict[str, float]:
        calls.append((name, repetition))
        return {"seconds": seconds[name] + repetition}

    async def run_later(name: str, repetition: int) -> dict[str, float]:
        return run(name, repetition)

    runs = asyncio.run(take_turns(run_later, list(seconds), 2, warm_ups=1))
    assert calls == [("fast", -1), ("slow", -1), ("slow", 0), ("fast", 0), ("fast", 1), ("slow", 1)]
    assert runs.values("seconds", "slow") == [10.0, 11.0] and runs.medians("fast", "fast_") == {"fast_seconds": 1.5}
    assert runs.ratio("seconds", "slow", over="fast") == (10 / 1 + 11 / 2) / 2
    assert asyncio.run(take_turns(lambda base, number: {"s": base + number}, {"a": 2}, 2)).values("s", "a") == [2, 3]


def test_the_table_has_a_row_for_each_arm_and_the_range_of_its_first_column(capsys: pytest.CaptureFixture[str]) -> None:
    runs = Runs(
        {
            "ours": [{"seconds": s, "share": 0.25} for s in (2.0, 4.0, 3.0)],
            "theirs": [{"seconds": 6.0, "share": 1.0}] * 3,
        }
    )
    runs.show("who is faster", {"seconds": ".1f", "share": ".0%"}, over="theirs")
    title, header, _, *rows = capsys.readouterr().out.splitlines()
    assert title == "who is faster" and header.split() == ["arm", "seconds", "min..max", "share", "over", "theirs"]
    assert [row.split() for row in rows[:2]] == [
        ["ours", "3.0", "2.0..4.0", "25%", "0.50"],
        ["theirs", "6.0", "6.0..6.0", "100%", "1.00"],
    ]


def test_only_the_named_parts_run_and_their_figures_are_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    parts = {"first": lambda: {"a": 1 / 3}, "second": lambda: {"b": 2.0}}
    run_parts(make_parser("doc", parts=list(parts)).parse_args(["--only", "first"]), parts)
    assert capsys.readouterr().out == '{"a": 0.3333}\n'
