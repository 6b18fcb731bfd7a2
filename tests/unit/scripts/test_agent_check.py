"""The command `slipstream agent-check`: its words, and what it refuses before it runs anything."""

from pathlib import Path

import pytest

from configs.schema import Config
from configs.validate import ConfigError
from scripts.agent_check import Arguments, check_agent, split
from tests.support.compose import changed

MINE = 'rollout.agent_command="python my_agent.py --n=3"'


def test_a_first_word_that_is_no_key_is_the_command() -> None:
    assert split(["python my_agent.py --n=3"]) == (Arguments(), ["model=chat", MINE])
    words = [
        "python my_agent.py --n=3",
        "prompt=2 + 2 = ?",
        "say=a=b.txt",
        "model.path=org/name",
        "sessions.max_turns=9",
    ]
    own, overrides = split(words)
    assert own == Arguments(prompt="2 + 2 = ?", say=Path("a=b.txt"))
    assert overrides == ["model=hf", MINE, "model.path=org/name", "sessions.max_turns=9"]
    assert split(["rollout.agent=codex", "recipe=agent"])[1] == ["rollout.agent=codex", "recipe=agent"]
    assert split([])[1] == ["model=chat"]
    assert split(["prompt=x", "run-it"])[1] == ["model=chat", "run-it"], "which is refused as no key"
    assert split(["X=1 run-it"])[1] == ["model=chat", 'rollout.agent_command="X=1 run-it"']


@pytest.mark.parametrize(
    ("keys", "own", "problem"),
    [
        (
            {},
            Arguments(),
            'rollout.agent_command=None: slipstream agent-check "COMMAND", or rollout.agent=claude_code, ',
        ),
        ({"agent": "codex"}, Arguments(), "rollout.agent=codex: codex is not on PATH; install it: npm install -g @op"),
        ({"agent_command": "run-it"}, Arguments(say=Path("/no/x")), "say=/no/x: [Errno 2] No such file or directory"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(
    keys: dict[str, str], own: Arguments, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError) as refusal:
        check_agent(changed(Config(), **{f"rollout__{key}": value for key, value in keys.items()}), own)
    assert str(refusal.value).startswith(problem)
