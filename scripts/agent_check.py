"""Run an agent once with a scripted model, and say what to know before training it.

slipstream agent-check "python my_agent.py"
slipstream agent-check "claude -p {prompt} --model policy" model.path=FOLDER
slipstream agent-check rollout.agent=codex say=answers.txt

    prompt=TEXT        what the agent is asked [What is 6 times 7?]
    say=FILE           the answers of the model, one in each line: a text, or {"name": "bash", "arguments": {...}}
    KEY=V              keys of the config, as in slipstream train: rollout.agent, rollout.agent_command, sessions.*

The agent talks to the gateway of a training, without an engine and without weights. Without say=, the model calls an
offered tool twice (`echo slipstream` where one runs commands), and then says that it is done. The agent acts on this
machine as it does in training: in a folder of its own, with your rights or in a sandbox (rollout.agent_sandbox).

The report names what the agent asked for, what was refused or left out, how many sequences would be trained and why,
how many tokens its prompts take by the tokenizer of model.path (else of the tiny model, which takes several times as
many), and the keys to set. Exit code: 0, or 1 where such an episode could not be trained.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.cli.arguments import override
from configs.named_agents import NAMED_AGENTS
from configs.schema import Config
from configs.validate import ConfigError
from scripts.command.command import FAILED, Ended, run_async
from scripts.command.config_only import ConfigOnly, take

KEY = re.compile(r"[~+]*[a-z][\w./@]*=")
"""The beginning of a word that is a key with its value, and no command."""
DEFAULT_PROMPT = "What is 6 times 7?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The words of the command line that are not keys of the config."""

    prompt: str = DEFAULT_PROMPT
    say: Path | None = None


def main() -> None:
    main = ConfigOnly(name="agent-check", description=__doc__, split=split, command=check_agent)
    main.exit(sys.argv[1:] or ["--help"])


def split(words: Sequence[str]) -> tuple[Arguments, list[str]]:
    """Return the words of this command, and the overrides of the config: a first word that is no key is the agent's
    command, and without a model the tokenizer is that of model.path or the tiny one for chats.

    Example: split(["python my_agent.py"])[1] == ["model=chat", 'rollout.agent_command="python my_agent.py"']
    """
    own, overrides = take(words, ("prompt", "say"))
    first = words[0] if words else ""
    if overrides[:1] == [first] and not KEY.match(first) and not first.startswith("-"):
        overrides[0] = override("rollout.agent_command", first)
    names = {word.partition("=")[0] for word in overrides}
    if not names & {"model", "recipe"}:
        overrides.insert(0, "model=hf" if "model.path" in names else "model=chat")
    say = Path(own["say"]).expanduser() if "say" in own else None
    return Arguments(prompt=own.get("prompt", DEFAULT_PROMPT), say=say), overrides


def check_agent(config: Config, own: Arguments) -> Ended:
    """Run the agent and write the report. Raises ConfigError for what cannot be run."""
    from scripts.launch.agents import refuse_without_agent
    from scripts.launch.sandboxes import refuse_without_sandboxes
    from scripts.plan.agent_report import report_text
    from scripts.plan.agent_trial import Script, try_agent
    from scripts.plan.preview import load_policy_tokenizer

    if config.rollout.agent is None and config.rollout.agent_command is None:
        names = ", ".join(NAMED_AGENTS)
        raise ConfigError(
            f'rollout.agent_command=None: slipstream agent-check "COMMAND", or rollout.agent={names} or module:function'
        )
    refuse_without_agent(config)
    refuse_without_sandboxes(config)
    try:
        script = Script() if own.say is None else Script.read(own.say)
    except (OSError, ValueError) as error:
        raise ConfigError(f"say={own.say}: {error}") from error
    try:
        tokenizer = load_policy_tokenizer(config)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={config.model.path}: no tokenizer on this machine: {error}") from error
    try:
        report = run_async(try_agent(config, tokenizer, own.prompt, script))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    sys.stdout.write(report_text(report))
    return Ended(exit_code=0 if report.is_trainable else FAILED)


if __name__ == "__main__":
    main()
