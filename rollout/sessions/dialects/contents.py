"""What messages and tools are made of, in every dialect."""

from collections.abc import Sequence

from rollout.sessions.dialects.fields import Fields
from rollout.sessions.messages import ToolSpec

PARSED, PARSED_ARGUMENTS = "parsed", "parsed_arguments"
"""What the client's library adds to an answer, and sends back: the same once more, as Python objects."""


def joined_text(fields: Fields, name: str, kinds: Sequence[str] = ("text",), without: str | None = None) -> str:
    """A string, or a list of parts of these types, joined: but for parts that begin with `without`. Images, audio and
    files are refused."""
    value = fields.take(name)
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise fields.refuse(name, value, "a string or a list of text parts")
    texts: list[str] = []
    for index, each in enumerate(value):
        part = Fields(each, f"{fields.path(name)}[{index}]")
        part.choice("type", kinds, "")
        texts.append(part.must_have_text("text"))
        part.ignore("cache_control", "prompt_cache_breakpoint", "citations", "annotations", "logprobs", PARSED)
        part.end()
    return "".join(text for text in texts if without is None or not text.startswith(without))


def tool_spec(fields: Fields, schema: str = "parameters") -> ToolSpec:
    """A tool; arguments are sampled freely, so that "strict" is a wish."""
    spec = ToolSpec(
        name=fields.must_have_text("name"),
        description=fields.text("description") or "",
        parameters=fields.mapping(schema),
    )
    fields.ignore("strict", "cache_control")
    fields.end()
    return spec
