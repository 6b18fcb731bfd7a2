"""The report of a dry run on a model's chat template."""

from copy import deepcopy

import pytest

from rollout.chat.append_only import Extension, append_only
from tests.support.chat_models import chat_tokenizer

EXACT = Extension.exact


@pytest.mark.parametrize(
    ("family", "user", "with_tools", "tool"),
    [
        ("qwen2.5", EXACT, EXACT, EXACT),
        ("qwen3", EXACT, EXACT, EXACT),
        ("glm", EXACT, EXACT, EXACT),
        ("llama3", EXACT, EXACT, Extension.unsupported),
        ("mistral", EXACT, Extension.template, EXACT),
        ("deepseek", Extension.template, Extension.template, Extension.template),
    ],
)
def test_the_report_says_which_turns_extend(
    family: str, user: Extension, with_tools: Extension, tool: Extension
) -> None:
    """The template of Llama 3 shows no calls, Mistral's moves tools, DeepSeek's begins reasoning in the prompt only."""
    report = append_only(chat_tokenizer(family))
    assert (report.after_user, report.after_user_with_tools, report.after_tool) == (user, with_tools, tool)
    assert report.is_append_only == (family not in ("mistral", "deepseek"))


def test_the_report_says_where_reasoning_stays() -> None:
    report = append_only(chat_tokenizer("qwen3"))
    assert (report.reasoning_kept_by_user_turn, report.reasoning_kept_by_tool_turn) == (False, True)
    assert str(report).startswith("chat template: append-only; ") and str(report).endswith("turns end with <|im_end|>")


def test_a_template_may_know_no_tools() -> None:
    tokenizer = deepcopy(chat_tokenizer("llama3"))
    refusal = "{%- if message.role == 'tool' %}{{ raise_exception('No tools!') }}{% endif %}"
    tokenizer.chat_template = tokenizer.chat_template.replace("{%- if loop.first %}", refusal + "{%- if loop.first %}")
    report = append_only(tokenizer)
    assert report.after_tool is Extension.unsupported and report.is_append_only
