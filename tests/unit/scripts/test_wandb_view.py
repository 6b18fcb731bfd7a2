"""`python -m scripts.wandb_view`: whose project it takes, what it says, and what it says when wandb says no."""

import sys

import pytest

from scripts import wandb_view
from trainer.tracking.wandb import workspace


@pytest.fixture(autouse=True)
def account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["wandb_view", "math"])
    monkeypatch.setattr(workspace, "default_entity", lambda: "me")
    monkeypatch.setattr(workspace, "ensure_workspace", lambda entity, project: f"https://x/{entity}/{project}")
    monkeypatch.setattr(workspace, "save_report", lambda entity, project: f"https://x/{entity}/{project}/reports/1")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    sys.argv[1:] = words
    wandb_view.main()
    return capsys.readouterr().out.splitlines()


def test_addresses_are_said_and_the_report_is_made_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "math") == ["saved view: https://x/me/math"]
    both = ["saved view: https://x/us/math", "report: https://x/us/math/reports/1"]
    assert said(capsys, "us/math", "--report") == both


def test_a_view_that_is_there_is_left_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "ensure_workspace", lambda entity, project: None)
    assert said(capsys, "math") == ["me/math has the saved view already"]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ModuleNotFoundError("No module named 'x'"), "wandb_view: No module named 'x'; pip install wandb-workspaces"),
        (ValueError("me/math: no such project"), "wandb_view: ValueError: me/math: no such project"),
    ],
)
def test_what_goes_wrong_is_said_in_a_line(error: Exception, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(entity: str, project: str) -> None:
        raise error

    monkeypatch.setattr(workspace, "ensure_workspace", fail)
    with pytest.raises(SystemExit) as ended:
        wandb_view.main()
    assert ended.value.code == sentence
