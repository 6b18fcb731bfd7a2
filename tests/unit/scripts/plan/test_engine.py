"""The vLLM that is installed: what is refused before anything starts, and what a dry run warns of."""

from dataclasses import replace

import pytest

from configs.schema import Config
from configs.validate import ConfigError
from scripts.plan import engine
from scripts.plan.engine import check_engine


@pytest.mark.parametrize(
    ("installed", "says"),
    [(None, "vLLM is not installed in .*: pip install"), ("0.25.1", "vLLM 0.25.1 is too old: 0.26 or newer is needed")],
)
def test_without_a_vllm_that_works_nothing_starts_and_a_dry_run_warns(
    installed: str | None, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "_installed", lambda: installed)
    with pytest.raises(ConfigError, match=says):
        check_engine(Config())
    check_engine(replace(Config(), dry_run=True))
    assert capsys.readouterr().err.startswith("warning: vLLM ")


def test_a_newer_vllm_is_warned_of_and_the_one_of_the_tests_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_engine(Config())
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(engine, "_installed", lambda: "0.34.0rc1")
    check_engine(Config())
    assert "vLLM 0.34.0rc1 is newer than 0.33" in capsys.readouterr().err
