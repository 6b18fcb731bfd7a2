"""Agents of others that rollout.agent runs by name, with the settings by which each talks to its session."""

import json
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Template

from configs.rollout import PROMPT_PLACEHOLDER


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedAgent:
    """An agent that is a command, as rollout.agent_command runs one.

    Example: NAMED_AGENTS["codex"].command == "codex exec --skip-git-repo-check ... {prompt}"
    """

    name: str
    argv: tuple[str, ...]
    """The words of the command. The prompt takes the place of {prompt}."""
    install: str
    """The command that installs the program, in the version that is tested."""
    context: int
    """The tokens that data.max_prompt_tokens and rollout.max_response_tokens must have together: its first prompt, and
    room to do something."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its environment besides those of the session."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that are written into its HOME before it starts, by path. $NAME stands for a variable of the session, such
    as $OPENAI_BASE_URL."""

    @property
    def program(self) -> str:
        return self.argv[0]

    @property
    def command(self) -> str:
        """The command in the form of rollout.agent_command."""
        return " ".join(word if word == PROMPT_PLACEHOLDER else shlex.quote(word) for word in self.argv)

    @property
    def problem(self) -> str | None:
        """Return why this machine cannot run it, or None."""
        if shutil.which(self.program) is not None:
            return None
        return f"{self.program} is not on PATH; install it: {self.install}"

    def written_files(self, session: Mapping[str, str]) -> dict[str, str]:
        """Return the files with the variables of a session in their places."""
        return {path: Template(text).substitute(session) for path, text in self.files.items()}


END_OF_OPTIONS = "--"
"""Without it, a prompt that begins with a dash is taken for an option."""
CODEX_SETTINGS = """\
model = "policy"
model_provider = "session"
[model_providers.session]
name = "session"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
OPENCODE_PROVIDER = {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"},
    "models": {"policy": {}},
}
ALL = (
    NamedAgent(
        name="claude_code",
        argv=(
            *("claude", "-p", "--model", "policy"),
            *("--allowedTools", "Bash", "Read", "Edit", "Write"),  # what it may do without asking, and nobody answers
            *(END_OF_OPTIONS, PROMPT_PLACEHOLDER),
        ),
        install="npm install -g @anthropic-ai/claude-code@2.1.197",
        context=32768,
        # It would also ask for a title of its session, with a schema, which is refused.
        environment={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
    ),
    NamedAgent(
        name="codex",
        argv=(
            *("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
            *(END_OF_OPTIONS, PROMPT_PLACEHOLDER),
        ),
        install="npm install -g @openai/codex@0.169.0",
        context=16384,
        files={".codex/config.toml": CODEX_SETTINGS},
    ),
    NamedAgent(
        name="opencode",
        argv=("opencode", "run", "--model", "session/policy", END_OF_OPTIONS, PROMPT_PLACEHOLDER),
        install="npm install -g opencode-ai@1.18.33",
        context=16384,
        files={"opencode.json": json.dumps({"provider": {"session": OPENCODE_PROVIDER}})},
    ),
    NamedAgent(
        name="mini_swe_agent",
        argv=(
            *("mini-swe-agent", "--yolo", "--exit-immediately", "--model", "openai/policy", "--task"),
            PROMPT_PLACEHOLDER,
        ),
        install="pipx install mini-swe-agent==2.4.6",
        context=4096,
        environment={
            "MSWEA_CONFIGURED": "true",  # or it asks for a model and a key
            "MSWEA_COST_TRACKING": "ignore_errors",  # the policy has no price
            "LITELLM_LOCAL_MODEL_COST_MAP": "true",  # or it is downloaded in every episode
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # or it asks on for minutes when its session has had its turns
        },
    ),
)
NAMED_AGENTS: Mapping[str, NamedAgent] = {agent.name: agent for agent in ALL}
