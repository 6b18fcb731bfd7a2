"""Programs of frameworks that nobody here wrote, as commands of an agent."""

import re
from collections.abc import Callable
from pathlib import Path

from configs.named_agents import NamedAgent
from tests.support.agent_installs import INSTALLS
from tests.support.paths import ROOT


def documented(file: str) -> str:
    """Return a script of the documentation."""
    (text,) = re.findall(
        rf"```\n((?:#|//) {re.escape(file)}: .*?)```", (ROOT / "docs/agents.md").read_text(), re.DOTALL
    )
    return text


def ai_sdk(folder: Path) -> NamedAgent:
    """Packages are looked for beside the script itself."""
    (folder / "node_modules").symlink_to(INSTALLS["ai-sdk"].folder / "node_modules")
    (folder / "agent.mjs").write_text(documented("my_ai_sdk_agent.mjs"))
    return NamedAgent(name="ai-sdk", argv=("node", str(folder / "agent.mjs"), "{prompt}"), install="", context=0)


def python(name: str, text: str) -> Callable[[Path], NamedAgent]:
    """A script for the interpreter of an agent's own packages."""

    def write(folder: Path) -> NamedAgent:
        (folder / "agent.py").write_text(text)
        argv = (str(INSTALLS[name].path), str(folder / "agent.py"), "{prompt}")
        return NamedAgent(name=name, argv=argv, install="", context=0)

    return write


OPENAI_AGENTS = """
import sys
from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)

@function_tool
def calculator(left: int, right: int) -> int:
    "Multiply two numbers."
    return left * right

agent = Agent(name="Solver", instructions="Use the calculator.", model="policy", tools=[calculator])
print(Runner.run_sync(agent, sys.argv[1]).final_output)
"""
PYDANTIC_AI = """
import sys
from pydantic import BaseModel
from pydantic_ai import Agent

class Number(BaseModel):
    value: int

agent = Agent("API:policy", output_type=Number, instructions="Use the calculator.")

@agent.tool_plain
def calculator(left: int, right: int) -> int:
    "Multiply two numbers."
    return left * right

print(agent.run_sync(sys.argv[1]).output.value)
"""
