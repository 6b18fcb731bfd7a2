"""`make retriever`, as a process: it says where it listens, answers, and ends when it is told to."""

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from configs.validate import ConfigError
from scripts.retriever import arguments
from tests.support.paths import ROOT

COMMAND = (sys.executable, "-m", "scripts.retriever")


def test_words_are_keys_with_values() -> None:
    given = arguments(["corpus=my/folder", "port=0"])
    assert given == {"kind": "fts5", "host": "127.0.0.1", "port": 0, "topk": 3, "corpus": "my/folder"}
    with pytest.raises(ConfigError, match="my/folder: must be key=value, such as corpus=FOLDER"):
        arguments(["my/folder"])


def test_it_serves_a_folder_until_it_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "towns.md").write_text("Marjol is a city.\n")
    command = [*COMMAND, f"corpus={tmp_path}", "port=0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            name, _, url = process.stdout.readline().strip().partition("=")
            assert name == "retriever.url"
            answer = httpx.post(url, json={"query": "Marjol", "topk": 1, "return_scores": True}, trust_env=False)
            assert answer.json()["result"][0][0]["document"]["text"] == "Marjol is a city."
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_help_says_what_there_is() -> None:
    done = subprocess.run([*COMMAND, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "corpus=FOLDER" in done.stdout and "port=8000" in done.stdout


@pytest.mark.parametrize(
    ("word", "message"),
    [("corpus=nowhere", "corpus=nowhere: no such file"), ("port=x", "port=x: must be a whole number from 0 to 65535")],
)
def test_a_wrong_word_is_an_error_that_names_it(word: str, message: str) -> None:
    done = subprocess.run([*COMMAND, word], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
