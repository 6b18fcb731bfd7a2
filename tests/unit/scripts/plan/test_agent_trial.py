"""An agent's one episode with a scripted model, over the real gateway, and what the report says of it."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from configs.rollout import SessionsConfig
from configs.schema import Config, RolloutConfig
from rollout.chat.messages import ToolSpec
from scripts.plan.agent_report import AgentReport, report_text
from scripts.plan.agent_trial import LAST_WORDS, SHELL_COMMAND, Script, example, try_agent
from tests.support.chat_models import chat_tokenizer
from tests.support.harnesses import FAMILY

AGENT = """
import json, os, sys, urllib.error, urllib.request

def ask(path, body=None):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, data, headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)

def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}

TOOLS = [tool("look"), tool("bash", command={"type": "string"})]
messages = [{"role": "user", "content": sys.stdin.read()}]
ask("/models")
ask("/chat/completions", {"model": "policy", "messages": messages, "response_format": {"type": "json_object"}})
for turn in range(4):
    body = {"model": "policy", "messages": messages, "tools": TOOLS[turn > 0 :], "temperature": 0.2, "verbosity": "low"}
    message = ask("/chat/completions", body)["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        break
    (call,) = message["tool_calls"]
    print(call["function"]["name"], call["function"]["arguments"])
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "slipstream"})
print("it says:", message["content"])
sys.exit(int(sys.argv[1]))
"""


def tried(command: str, script: Script | None = None, **sessions: float) -> AgentReport:
    config = Config(rollout=RolloutConfig(agent_command=command), sessions=SessionsConfig(**sessions))  # pyright: ignore
    return asyncio.run(try_agent(config, chat_tokenizer(FAMILY), "What is 6 times 7?", script or Script()))


@pytest.fixture
def agent(tmp_path: Path) -> str:
    (tmp_path / "agent.py").write_text(AGENT)
    return f"{sys.executable} {tmp_path / 'agent.py'}"


def test_the_report_of_an_agent_says_what_it_asked_and_what_would_be_trained(agent: str) -> None:
    report = tried(f"{agent} 0")
    assert report.is_trainable and (report.exit_code, report.num_answers) == (0, 3)
    assert report.processor_s is not None and report.processor_s > 0, "of the command, which was waited for"
    text = report_text(report)
    first, second = report.rows
    assert (first.num_answers, second.num_answers) == (1, 2)
    for line in (
        f"rollout.agent_command={agent} 0\n",
        " with exit code 0\n",
        f'| bash {{"command": "{SHELL_COMMAND}"}}\n',
        f"| it says: {LAST_WORDS}\n",
        "GET /v1/models: once\n",
        "POST /v1/chat/completions (OpenAI chat completions): 4 times\n",
        'parameters: model="policy", response_format={"type": "json_object"}, temperature=0.2, verbosity="low"\n',
        "2 tools: look, bash\n",
        '400 POST /v1/chat/completions, once: response_format = {"type": "json_object"}: allowed is only null or',
        "verbosity, which the policy does not read\n",
        "temperature: answers are sampled as rollout.temperature says\n",
        "3 answers in 2 rows\n",
        f"row 2: a prompt of {second.prompt_tokens} tokens, then 2 answers, {second.tokens} tokens in all\n",
        "1 of them began by tools: the agent offered other tools than before\n",
        "tokens, by the tokenizer of the tiny model\n",
        f"the first prompt of a row: {second.prompt_tokens} at most\n",
        f"the longest prompt: {report.longest_prompt}\n",
        f"all answers together: {report.sampled_tokens}, by a script\n",
        f"'rollout.agent_command={agent} 0'\n",
        "data.max_prompt_tokens=1024 ",
        "rollout.max_response_tokens=4096 ",
        "and a model that supports 5,120 tokens\n",
    ):
        assert line in text, f"{line!r} is not in\n{text}"


def test_an_agent_that_fails_is_reported_with_its_exit_code_and_its_last_words(agent: str) -> None:
    report = tried(f"{agent} 3")
    assert not report.is_trainable and report.exit_code == 3 and report.num_answers == 3
    text = report_text(report)
    assert " with exit code 3\n" in text and "the episode has failed: " in text
    silent = tried("echo where am I >&2; exit 127")
    assert not silent.is_trainable and silent.last_lines == ("where am I",)
    assert "nothing: is it told where the session is" in report_text(silent)


def test_an_agent_that_does_not_end_is_ended_and_reported() -> None:
    report = tried("echo I wait; sleep 300", idle_timeout_s=1.0)
    assert report.exit_code is None and report.last_lines == ("I wait",) and report.seconds < 60
    assert "it did not end by itself: it reached sessions.idle_timeout_s=1\n" in report_text(report)


def test_the_model_says_the_lines_of_a_file(agent: str, tmp_path: Path) -> None:
    file = tmp_path / "say.txt"
    file.write_text('{"name": "look", "arguments": {"at": "it"}}\nIt is 42.\n')
    report = tried(f"{agent} 0", Script.read(file))
    assert report.last_lines == ('look {"at": "it"}', "it says: It is 42.") and report.num_answers == 2
    for wrong, why in [
        ("", "answer in each line"),
        ('a\n{"name": "look"}', "^line 2: "),
        ('a\n{"name": 1, ', "^line 2: "),
    ]:
        file.write_text(wrong)
        with pytest.raises(ValueError, match=why):
            Script.read(file)


def test_a_call_by_script_has_the_arguments_that_the_schema_needs() -> None:
    schema = {
        "type": "object",
        "properties": {
            "cmd": {"type": "array", "items": {"type": "string"}},
            "mode": {"enum": ["fast", "slow"]},
            "where": {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "null"}]},
            "deep": {"type": "object", "properties": {"x": {"type": ["boolean", "null"]}}, "required": ["x"]},
            "why": {"type": "string"},
            "optional": {"type": "string"},
        },
        "required": ["mode", "where", "deep", "why"],
    }
    expected = {"cmd": SHELL_COMMAND.split(), "mode": "fast", "where": 3, "deep": {"x": False}, "why": "1 + 1"}
    assert example(schema) == expected and example({}) == {} and example(None) == {}


def test_the_script_prefers_a_shell_and_ends_by_the_tool_for_it() -> None:
    tools = [
        ToolSpec(name="look"),
        ToolSpec(name="final_answer"),
        ToolSpec(name="sh", parameters={"properties": {"cmd": {}}}),
    ]
    names = [json.loads(Script().answer(turn, tools).splitlines()[1])["name"] for turn in range(3)]
    assert names == ["sh", "sh", "final_answer"] and Script().answer(0, []) == LAST_WORDS
