"""Tools as the dialects offer them, and the functions that the policy reads in their place.

A harness runs *functions*, *custom* tools, whose input is one text, and the functions of a *namespace*. Anthropic's API
knows the schemas of a few more that the harness runs. All other types of tools run at a provider, and are left out.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout.chat.messages import ToolSpec
from rollout.http.guard import parse_strictly
from rollout.sessions.dialects.fields import Fields, tool_spec
from rollout.sessions.dialects.rule import misspelled

RUN_BY_HARNESS = ("function", "custom", "namespace")
"""Types of tools that no provider runs, in any dialect."""
PLAIN = "functions"
"""The namespace of functions that are in none."""
INPUT = "input"
"""The only argument of the function that stands for a custom tool."""
WORDS = ("auto", "none", "required")
"""Choices of a tool that name none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTool:
    """A tool that the policy may call, and the way its harness knows it."""

    spec: ToolSpec
    """The function that the policy reads."""
    name: str
    """The name by which the harness runs it, inside the namespace if there is one."""
    namespace: str | None = None
    is_custom: bool = False
    """True if its input is a text rather than an object."""


Offers = Mapping[str, OfferedTool]
"""The tools of a request, by the names that the policy reads."""


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name of a function that the policy reads.

    Example: flat_name("add", "mcp__calculator") == "mcp__calculator__add"
    """
    if not namespace or namespace == PLAIN:
        return name
    return f"{namespace.removesuffix('__')}__{name}"


def custom_arguments(text: str) -> str:
    """Return the arguments of a call of a custom tool, as the policy writes them."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool. Arguments that are not its only field are the input as they are."""
    try:
        value = parse_strictly(arguments.encode())
    except ValueError:
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else arguments


# -- OpenAI ------------------------------------------------------------------------------------------------------------


def chat_tools(fields: Fields) -> tuple[OfferedTool, ...]:
    """Return the tools of a request to chat completions, each in the field that is named like its type."""
    kinds = RUN_BY_HARNESS[:2]
    tools = [tool for item in fields.items("tools") for tool in _openai_tools(item, kinds, is_nested=True)]
    return with_names_apart(fields, tools)


def response_tools(fields: Fields) -> list[OfferedTool]:
    """Return the tools of a request to Responses, or of an item of its input that has more of them."""
    return [tool for item in fields.items("tools") for tool in _openai_tools(item, RUN_BY_HARNESS, is_nested=False)]


def _openai_tools(fields: Fields, kinds: Sequence[str], *, is_nested: bool) -> Iterator[OfferedTool]:
    if (kind := _kind_of(fields, fields.take("type"), kinds)) is None:
        return
    if kind == "namespace":
        yield from _namespace(fields)
        return
    inner = fields.must_have_object(kind, "an object with a name") if is_nested else fields
    fields.ignore("cache_control", "defer_loading", "allowed_callers", "output_schema")
    spec = _custom_spec(inner) if kind == "custom" else tool_spec(inner)
    inner.end()
    fields.end()
    yield OfferedTool(spec=spec, name=spec.name, is_custom=kind == "custom")


def _namespace(fields: Fields) -> Iterator[OfferedTool]:
    """Yield the tools of a namespace, the first of which says what the namespace is for."""
    namespace, about = fields.must_have_text("name"), fields.text("description")
    inner = [
        tool for item in fields.items("tools") for tool in _openai_tools(item, RUN_BY_HARNESS[:2], is_nested=False)
    ]
    fields.end()
    if namespace == PLAIN:
        yield from inner
        return
    for tool in inner:
        description = f"({namespace}: {about})\n{tool.spec.description}" if about else tool.spec.description
        spec = replace(tool.spec, name=flat_name(tool.name, namespace), description=description)
        yield replace(tool, spec=spec, namespace=namespace)
        about = None


def _custom_spec(fields: Fields) -> ToolSpec:
    name, description = fields.must_have_text("name"), fields.text("description") or ""
    if (form := fields.object("format")) is not None:
        kind = form.choice("type", ("text", "grammar"), "text")
        if kind == "grammar":
            grammar = form.object("grammar") or form
            syntax, definition = grammar.text("syntax") or "", grammar.must_have_text("definition")
            grammar.end()
            description += f"\n\nThe input must follow this grammar ({syntax}):\n{definition}"
            form.leave_out("type", kind, kind)  # the policy reads it, and nothing enforces it
        form.end()
    schema = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    return ToolSpec(name=name, description=description, parameters=schema)


def openai_choice(fields: Fields, tools: Sequence[OfferedTool], *, is_nested: bool) -> str:
    """Return "auto", "none", "required" or the name of a tool, as the policy reads it."""
    choice = fields.take("tool_choice")
    if choice is None or choice in WORDS:
        return checked_choice(fields, choice or "auto", tools)
    if not isinstance(choice, Mapping):
        raise fields.refuse("tool_choice", choice, f"one of {', '.join(WORDS)} or a function")
    outer = inner = fields.within(choice, fields.path("tool_choice"))
    kind = outer.choice("type", ("function", "custom", "allowed_tools"), "")
    if is_nested:
        inner = outer.object(kind) or fields.within({}, outer.path(kind))
    if kind == "allowed_tools":
        mode = inner.choice("mode", ("auto", "required"), "auto")
        names = [_allowed_name(tool, is_nested) for tool in inner.items("tools")]
        if not any(tool.spec.name in names for tool in tools):
            raise inner.refuse("tools", names, _names(tools))
        outer.leave_out("type", kind, kind)
        choice = mode
    else:
        choice = flat_name(inner.must_have_text("name"), inner.text("namespace"))
    inner.end()
    outer.end()
    return checked_choice(fields, choice, tools)


def _allowed_name(fields: Fields, is_nested: bool) -> str:
    kind = fields.text("type") or ""
    inner = fields.object(kind) if is_nested else fields
    name, namespace = (None, None) if inner is None else (inner.text("name"), inner.text("namespace"))
    fields.drop()
    return flat_name(name or kind, namespace)


# -- Anthropic ---------------------------------------------------------------------------------------------------------


def _schema(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required]}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
RANGE = {"type": "array", "items": NUMBER, "description": "The first and the last line to show; -1 is the end."}
EDITS = {"path": TEXT, "file_text": TEXT, "old_str": TEXT, "new_str": TEXT, "insert_line": NUMBER, "view_range": RANGE}
COMMANDS = ("view", "create", "str_replace", "insert")


def _command(*commands: str) -> dict[str, Any]:
    return {"type": "string", "enum": [*commands]}


KNOWN: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bash": (
        "Run a command in a shell that lives on between calls. `restart` starts the shell anew.",
        _schema((), command=TEXT, restart={"type": "boolean"}),
    ),
    "text_editor": (
        "View, create and edit files. `insert` puts a text after line `insert_line`.",
        _schema(("command", "path"), command=_command(*COMMANDS), insert_text=TEXT, **EDITS),
    ),
    "memory": (
        "Keep notes in files below /memories, which are there in later conversations.",
        _schema(
            ("command",),
            command=_command(*COMMANDS, "delete", "rename"),
            insert_text=TEXT,
            old_path=TEXT,
            new_path=TEXT,
            **EDITS,
        ),
    ),
}
"""Tools that harnesses run and whose schemas Anthropic's API knows, by their types without the date. (A harness also
runs `computer`, whose results are images.)"""


def anthropic_tools(fields: Fields) -> tuple[OfferedTool, ...]:
    tools = [tool for item in fields.items("tools") if (tool := _anthropic_tool(item)) is not None]
    return with_names_apart(fields, tools)


def _anthropic_tool(fields: Fields) -> OfferedTool | None:
    dated = fields.take("type")
    known = re.sub(r"_\d{8}$", "", dated) if isinstance(dated, str) else ""
    if known in KNOWN and known != dated:
        description, schema = KNOWN[known]
        spec = ToolSpec(name=fields.text("name") or known, description=description, parameters=schema)
        fields.ignore("cache_control", "max_characters")
    else:
        if _kind_of(fields, dated or "custom", ("custom",)) is None:
            return None
        # A tool whose loading is deferred is shown at once: the search that would find it runs at the provider.
        fields.ignore("eager_input_streaming", "defer_loading", "input_examples", "allowed_callers")
        spec = tool_spec(fields, "input_schema")
    fields.end()
    return OfferedTool(spec=spec, name=spec.name)


def anthropic_choice(fields: Fields, tools: Sequence[OfferedTool]) -> str:
    if (choice := fields.object("tool_choice")) is None:
        return "auto"
    words = {"auto": "auto", "any": "required", "none": "none"}
    kind = choice.choice("type", (*words, "tool"), "")
    choice.hint("disable_parallel_tool_use", False)  # the policy decides how many calls an answer has
    word = choice.must_have_text("name") if kind == "tool" else words[kind]
    choice.end()
    return checked_choice(fields, word, tools)


# -- both --------------------------------------------------------------------------------------------------------------


def checked_choice(fields: Fields, choice: str, tools: Sequence[OfferedTool]) -> str:
    """Return a choice, which is a hint: an answer is sampled freely, and may have another call than this or none.
    Refuse one that nothing could follow, because it is about tools that the policy does not have."""
    names = [tool.spec.name for tool in tools]
    if choice == "required" and not names:
        raise fields.refuse("tool_choice", choice, f"auto or none: {_names(tools)}")
    if choice not in (*WORDS, *names):
        raise fields.refuse("tool_choice", choice, f"one of {', '.join(WORDS)} or a tool: {_names(tools)}")
    if choice != "auto" and names:
        fields.leave_out("tool_choice", choice if choice in WORDS else "a tool", choice)
    return choice


def _names(tools: Sequence[OfferedTool]) -> str:
    names = ", ".join(tool.spec.name for tool in tools)
    return f"the policy can call {names}" if names else "the policy can call nothing"


def _kind_of(fields: Fields, kind: Any, kinds: Sequence[str]) -> str | None:
    """Return the type of a tool that the harness runs; None for one that only a provider can run, which is left out."""
    if isinstance(kind, str) and kind in kinds:
        return kind
    is_ours = not isinstance(kind, str) or not kind or kind in RUN_BY_HARNESS
    if is_ours or misspelled(kind, RUN_BY_HARNESS) is not None:
        raise fields.refuse("type", kind, "one of " + ", ".join(json.dumps(word) for word in kinds))
    fields.leave_out("type", kind, kind)
    fields.drop()
    return None


def with_names_apart(fields: Fields, tools: Sequence[OfferedTool]) -> tuple[OfferedTool, ...]:
    """Return the tools. Refuse two that the policy could not tell apart, and whose harness runs them differently."""
    ways: dict[str, tuple[str, str | None, bool]] = {}
    for tool in tools:
        way = (tool.name, tool.namespace, tool.is_custom)
        if ways.setdefault(tool.spec.name, way) != way:
            raise fields.refuse("tools", tool.spec.name, "names that no two tools have")
    return tuple(tools)
