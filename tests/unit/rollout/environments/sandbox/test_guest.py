"""The parts of a sandbox's process 1 that can be tried outside one."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.environments.sandbox import guest

NAMES = st.sampled_from(["a", "b", "c", "-x", " "])
KINDS = st.sampled_from(["folder", "file", "link", "dangling", "closed"])


@settings(deadline=None, max_examples=50)
@given(entries=st.lists(st.tuples(st.lists(NAMES, min_size=1, max_size=4), KINDS), max_size=20))
def test_a_folder_is_emptied_whatever_is_in_it_and_links_are_not_followed(
    entries: list[tuple[list[str], str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.mktemp("guest")
    outside, folder = base / "outside", base / "folder"
    outside.mkdir()
    folder.mkdir()
    (outside / "kept").write_text("ours")
    for names, kind in entries:
        path = folder.joinpath(*names)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind in ("folder", "closed"):
                path.mkdir(mode=0o000 if kind == "closed" else 0o755)
            elif kind == "file":
                path.touch()
            else:
                path.symlink_to(outside if kind == "link" else "nowhere")
        except OSError:  # something else is there
            continue
    guest.empty(str(folder))
    assert list(folder.iterdir()) == []
    assert (outside / "kept").read_text() == "ours"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (3 << 8, (3, None)),
        (signal.SIGKILL, (137, None)),
        (signal.SIGXCPU, (None, "cpu")),
        ((128 + signal.SIGXCPU) << 8, (None, "cpu")),  # as a shell tells of what it ran
    ],
)
def test_how_a_process_ended(status: int, said: tuple[int | None, str | None]) -> None:
    assert guest.ending(status) == said


def test_it_does_not_run_outside_of_a_sandbox() -> None:
    """It would end every process that it may."""
    done = subprocess.run([sys.executable, str(Path(guest.__file__)), "{}"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "must be process 1 of a sandbox" in done.stderr
