"""The files of a run are read by offset, and a line that is not whole costs nothing else."""

import json
from pathlib import Path

import pytest

from scripts.dashboard import routes
from scripts.dashboard.groups import MOST_CHARACTERS, group_table, trajectory
from scripts.observe.files import RunError, parse_objects, read_page, read_tail
from scripts.observe.run import Run, read_index

SPANS = [{"prompt_tokens": 2, "response_tokens": 9, "loss_tokens": 9, "versions": [[0, 4, 2], [4, 9, 3]]}]


def row(ordinal: int, index: int, **more: object) -> dict[str, object]:
    return {
        "ordinal": ordinal,
        "index": index,
        "prompt": f"prompt {ordinal}",
        "sequences": SPANS,
        "reward": 1.0,
        **more,
    }


def write_step(run_dir: Path, step: int, *lines: dict[str, object] | str) -> Path:
    path = run_dir / "trajectories" / f"step_{step:06d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_pages_go_on_where_the_last_one_ended_and_leave_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":2}\n{"a":3}\n{"a"')
    first = read_page(path, max_bytes=10)
    assert first.lines == (b'{"a":1}',) and first.has_more
    rest = read_page(path, first.offset, first.identity)
    assert rest.lines == (b'{"a":2}', b'{"a":3}') and not rest.is_new
    with path.open("ab") as file:
        file.write(b":4}\n")
    assert read_page(path, rest.offset, rest.identity).lines == (b'{"a":4}',)


def test_a_line_longer_than_a_page_comes_whole(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"x" * 1000 + b"\n")
    assert read_page(tmp_path / "m", max_bytes=10).lines == (b"x" * 1000,)


def test_a_file_that_has_taken_the_place_of_another_is_read_from_its_start(tmp_path: Path) -> None:
    """A resume cuts metrics.jsonl by writing another file."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"1\n2\n3\n")
    page = read_page(path)
    (tmp_path / "new").write_bytes(b"1\n2\n9\n8\n")
    (tmp_path / "new").replace(path)
    again = read_page(path, page.offset, page.identity)
    assert again.is_new and again.lines == (b"1", b"2", b"9", b"8")
    assert read_page(tmp_path / "none").lines == ()


def test_a_tail_has_whole_lines_only_and_damaged_ones_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"a":1}\n{"a":2}\nnonsense\n[1]\n')
    assert read_tail(path, 20) == [b"nonsense", b"[1]"]
    assert parse_objects(read_tail(path, 999)) == ([{"a": 1}, {"a": 2}], 2)


def test_an_index_finds_every_trajectory_by_its_offset(tmp_path: Path) -> None:
    path = write_step(
        tmp_path, 5, row(7, 0), "{torn", row(7, 1, error="timeout", reward=None), row(8, 0, response="\ud800")
    )
    index = read_index(path)
    assert (len(index.entries), index.num_damaged) == (3, 1)
    assert [entry.place for entry in index.entries] == [0, 2, 3]  # as the arrays of tokens have them
    run = Run.open(tmp_path)
    assert run.record(5, run.entry(5, 7, 1))["error"] == "timeout"
    assert index.staleness(5) == {1: 15, 2: 12}
    with pytest.raises(RunError, match=r"step=6: no trajectories"):
        run.index(6)


def test_an_index_follows_a_file_that_was_written_again(tmp_path: Path) -> None:
    run = Run.open(tmp_path)
    write_step(tmp_path, 5, row(7, 0))
    assert len(run.index(5).entries) == 1
    write_step(tmp_path, 5, row(7, 0), row(8, 0))
    assert len(run.index(5).entries) == 2


def test_groups_are_sorted_and_filtered_and_those_without_a_number_come_last(tmp_path: Path) -> None:
    rows = [row(1, 0, reward=0.0), row(1, 1, reward=1.0), row(2, 0, reward=0.5), row(3, 0, reward=None, error="no")]
    index = read_index(write_step(tmp_path, 1, *rows))

    def ordinals(sort: str = "ordinal", which: str = "all", text: str = "", descending: bool = True) -> list[int]:
        return [one["ordinal"] for one in group_table(index, sort=sort, descending=descending, which=which, text=text)]

    assert ordinals("std") == [1, 2, 3] and ordinals("std", descending=False) == [2, 1, 3]
    assert ordinals(which="failed") == [3]
    assert ordinals(which="equal") == [2]
    assert ordinals(which="mixed") == [1]
    assert ordinals(which="spanning") == [3, 2, 1]
    assert ordinals(text="PROMPT 2") == [2]
    with pytest.raises(RunError, match="sort=prompt: must be one of ordinal, reward"):
        ordinals("prompt")


def test_a_huge_text_is_cut_and_says_so(tmp_path: Path) -> None:
    write_step(tmp_path, 1, row(1, 0, response="x" * (MOST_CHARACTERS + 7)))
    response = trajectory(Run.open(tmp_path), 1, 1, 0)["record"]["response"]
    assert response.endswith("[... 7 more characters]") and len(response) < MOST_CHARACTERS + 40


def test_a_log_that_links_to_a_file_elsewhere_is_none_of_the_run(tmp_path: Path) -> None:
    run, secret = tmp_path / "run", tmp_path / "secret"
    secret.write_text("s3cret")
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "own.log").write_text("own")
    (run / "logs" / "again.log").symlink_to(run / "logs" / "own.log")
    for name in ("driver.log", "logs/passwd.log", "config.yaml", "summary.json"):
        (run / name).symlink_to(secret)
    assert list(Run(run).logs()) == ["again.log", "own.log"]
    shown = routes.config(Run(run))
    assert shown["config"] is None and shown["summary"] is None
