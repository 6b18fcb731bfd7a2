"""The command of `make serve`: what it says of a harness, and the chat template that it gives to the tiny model."""

from pathlib import Path

import pytest

from configs.schema import Config
from rollout.chat.messages import Message, Role
from rollout.chat.render import Parent
from rollout.sessions.codec import make_codec
from scripts.launch.models import chat_template
from scripts.serve import serve
from tests.support.compose import changed, invocation
from trainer.tiny.model import build_tokenizer


@pytest.mark.parametrize("key", ["agent", "agent_command"])
def test_a_harness_of_a_recipe_is_not_run_and_the_command_that_runs_it_is_named(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = changed(Config(dry_run=True), **{f"rollout__{key}": "my_agent:agent"})
    assert serve(invocation(config, tmp_path)).exit_code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"rollout.{key}=my_agent:agent is not run here") and "make evaluate" in said


def test_conversations_with_the_tiny_model_only_grow_at_their_end() -> None:
    config = Config()
    tokenizer = build_tokenizer(["Question: 2 + 3?\nAnswer: 5\n"])
    tokenizer.chat_template = chat_template(config)
    renderer = make_codec(config.sessions, tokenizer).renderer
    question, answer, more = (
        Message(role=Role.user, content="2 + 3?"),
        Message(role=Role.assistant, content="5"),
        Message(role=Role.user, content="4 + 4?"),
    )
    prompt = renderer.full([question])
    assert renderer.text(prompt) == config.data.prompt_template.replace("{question}", "2 + 3?")
    sampled = [*renderer.plain("5"), tokenizer.eos_token_id]
    bridge = renderer.bridge(Parent(token_ids=[*prompt, *sampled], ended=True), [more])
    assert bridge is not None and renderer.text(bridge) == config.data.prompt_template.replace("{question}", "4 + 4?")
    assert [*prompt, *sampled, *bridge] == renderer.full([question, answer, more])
    said = renderer.text(renderer.full([Message(role=Role.system, content="Be brief."), question]))
    assert said == "Be brief.\n" + renderer.text(prompt)
