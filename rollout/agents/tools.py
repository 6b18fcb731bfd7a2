"""Python functions as tools: their schemas, their calls, and the environment that answers a policy with them."""

import asyncio
import inspect
import pickle
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NotRequired, Protocol, Self, get_args, get_origin, get_type_hints

import docstring_parser
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python
from typing_extensions import TypedDict

from rollout.actors.resident import UnloadableError
from rollout.agents.environment import Step, Turn
from rollout.agents.threads import called
from rollout.agents.tool_processes import KEY, check_by_name, processes_here
from rollout.chat.messages import Message, Role, ToolCall, ToolSpec, without_halves
from rollout.rewards.outcome import described

MAX_NAME_CHARS = 64
"""The limit of OpenAI's and Anthropic's endpoints."""


class _Schema(GenerateJsonSchema):
    """Leave out the titles, which repeat the names and cost the policy tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Tool:
    """A Python function that the policy may call.

    Example, with the schema that the policy is shown:
        def add(left: int, right: int = 1) -> int:
            '''Add two numbers.

            Args:
                left: The first of them.
            '''
        {"type": "object", "properties": {"left": {"description": "The first of them.", "type": "integer"},
            "right": {"default": 1, "type": "integer"}}, "required": ["left"], "additionalProperties": False}
    """

    function: Callable[..., Any]
    """Async, or one that may block: it then runs where rollout.tools_run_in says."""
    spec: ToolSpec
    arguments: TypeAdapter[Mapping[str, Any]]
    """Reads the arguments of a call."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Self:
        """Describe a function by its name, type annotations and docstring: the `Args` of a Google, numpy or Sphinx
        docstring, or `Annotated[int, "description"]`.

        Raises:
            ValueError: a parameter has no type that JSON can say, or the policy could not name it.
        """
        if not inspect.isroutine(function) or not function.__name__.isidentifier():
            raise ValueError(f"tool {function!r:.100}: needs a name, which a def has and a lambda or partial has not")
        name = function.__name__
        if len(name) > MAX_NAME_CHARS:
            raise ValueError(f"tool {name}: endpoints allow names of at most {MAX_NAME_CHARS} characters")
        docstring = docstring_parser.parse(inspect.getdoc(function) or "")
        described_there = {param.arg_name: param.description for param in docstring.params if param.description}
        hints = get_type_hints(function, include_extras=True)
        parameters = {
            parameter.name: _field(name, parameter, hints, described_there.get(parameter.name))
            for parameter in inspect.signature(function).parameters.values()
        }
        try:
            typed = with_config(ConfigDict(extra="forbid"))(TypedDict(name, parameters))  # pyright: ignore
            adapter = TypeAdapter[Mapping[str, Any]](typed)
            schema = adapter.json_schema(schema_generator=_Schema)
        except Exception as error:
            raise ValueError(f"tool {name}: has a parameter that no JSON schema describes: {error}") from error
        for titled in (schema, *schema.get("$defs", {}).values()):
            titled.pop("title", None)
        description = "\n\n".join(filter(None, (docstring.short_description, docstring.long_description)))
        return cls(function, ToolSpec(name=name, description=description, parameters=schema), adapter)


def _field(tool: str, parameter: inspect.Parameter, hints: Mapping[str, Any], description: str | None) -> Any:
    """Return the type of a parameter, with its description and default."""
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise ValueError(f"tool {tool}: parameter {parameter} cannot be given by name")
    if parameter.name not in hints:
        raise ValueError(f"tool {tool}: parameter {parameter.name} has no type; annotate it, for example with int")
    hint = hints[parameter.name]
    if get_origin(hint) is Annotated:  # a text in it describes the parameter
        description = next((text for text in get_args(hint)[1:] if isinstance(text, str)), description)
    if parameter.default is parameter.empty:
        return Annotated[hint, Field(description=description)] if description else hint
    extra = {} if parameter.default is None else {"default": to_jsonable_python(parameter.default, fallback=str)}
    return NotRequired[Annotated[hint, Field(description=description, json_schema_extra=extra)]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    text: str
    """The text that the policy reads: what the tool returned, or "Error: " and what went wrong."""
    is_error: bool = False
    is_cut: bool = False
    """True where the text was longer than allowed."""


class Tools(Protocol):
    """The tools of an episode, wherever they run. `Toolbox` is one."""

    def specs(self) -> Sequence[ToolSpec]:
        """Return the tools for the chat template, or an endpoint."""
        ...

    async def result(self, call: ToolCall) -> ToolResult:
        """Run a call. What the policy did wrong is a result too, for it to read. Raises what is not its fault: the
        episode then has no reward."""
        ...


def no_tool(name: str, names: Iterable[str]) -> str:
    """Return what the policy reads where none of the tools has the name that it called."""
    return f"no tool is named {name!r}; there are: {', '.join(names) or 'none'}"


def capped(text: str, most: int, *, is_error: bool = False) -> ToolResult:
    """A result of at most `most` characters, and a line that says how many there were."""
    text = without_halves(text)
    if len(text) <= most:
        return ToolResult(text=text, is_error=is_error)
    return ToolResult(text=f"{text[:most]}\n[cut: {most} of {len(text)} characters]", is_error=is_error, is_cut=True)


class Toolbox:
    """Tools of Python functions, for an episode or for many: it holds no state of its own.

    Example:
        toolbox = Toolbox([search, add])
        await toolbox.call(ToolCall(call_id="call_0", name="add", arguments='{"left": 2, "right": 2}'))  # "4"
    """

    def __init__(
        self,
        functions: Iterable[Callable[..., Any] | Tool],
        *,
        call_timeout_s: float = 30.0,
        max_output_chars: int = 8192,
    ):
        """`call_timeout_s`: of each call. `max_output_chars`: of each result; of a longer one the policy reads the
        beginning. Raises ValueError for a function that is no tool, and for two of one name."""
        tools = [function if isinstance(function, Tool) else Tool.of(function) for function in functions]
        self._tools = {tool.spec.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            names = [tool.spec.name for tool in tools]
            raise ValueError(f"tools {names}: two of them have one name")
        if max_output_chars < 1:
            raise ValueError(f"max_output_chars={max_output_chars}: must be at least 1")
        self._call_timeout_s, self._max_output_chars = call_timeout_s, max_output_chars
        self._may_run_in_processes = False
        self._check()

    def _check(self) -> None:
        """Raise ValueError for a tool that cannot run where rollout.tools_run_in says."""
        if processes_here() is not None and not self._may_run_in_processes:
            for tool in self._tools.values():
                if not inspect.iscoroutinefunction(tool.function):
                    _check_for_process(tool)
            self._may_run_in_processes = True

    def specs(self) -> tuple[ToolSpec, ...]:
        """Return the tools for the chat template, or an endpoint. Raises ValueError for one that cannot run where
        rollout.tools_run_in says."""
        self._check()
        return tuple(tool.spec for tool in self._tools.values())

    async def call(self, call: ToolCall) -> str:
        """Return the text of the call's result."""
        return (await self.result(call)).text

    async def result(self, call: ToolCall) -> ToolResult:
        """Run a call. What goes wrong with it is a result too, for the policy to read: a name that no tool has,
        arguments that do not fit, an error that the tool raises, a deadline, the end of its process.

        Raises:
            ValueError: The tool cannot run where rollout.tools_run_in says.
            UnloadableError: Its process cannot load it.
        """
        self._check()
        try:
            return await self._run(call)
        except UnloadableError:
            raise
        except Exception as error:
            return _wrong(error, self._max_output_chars)

    async def _run(self, call: ToolCall) -> ToolResult:
        tool = self._tools.get(call.name)
        if tool is None:
            raise _WrongCall(no_tool(call.name, self._tools))
        is_async, processes = inspect.iscoroutinefunction(tool.function), processes_here()
        limit = (self._call_timeout_s, "call_timeout_s")
        what = f"the tool {call.name}"
        if processes is not None and not is_async:
            arguments = (tool.function, call.arguments, self._max_output_chars)
            return await processes.call(RUNNER, arguments, what, *limit)
        function = tool.function if is_async else partial(_texted, tool)
        value = await called(function, *limit, what, **_arguments(tool, call.arguments))
        return capped(_as_text(call.name, value), self._max_output_chars)


def _texted(tool: Tool, /, **arguments: Any) -> Any:
    """Return the text of what a plain function returns, or the awaitable that it returns."""
    value = tool.function(**arguments)
    return value if inspect.isawaitable(value) else _as_text(tool.spec.name, value)


def _check_for_process(tool: Tool) -> None:
    check_by_name(tool.function)
    if Tool.of(tool.function).spec != tool.spec:
        raise ValueError(f"{KEY}: the tool {tool.spec.name} is not as its function describes it; pass the function")


class ToolRunner:
    """Calls tools in a process of their own. Everything that a policy's arguments and a tool's value can do happens
    there."""

    def __init__(self) -> None:
        self._tools: dict[Callable[..., Any], Tool] = {}

    def run(
        self, function: Callable[..., Any], arguments: str, max_output_chars: int
    ) -> ToolResult | Awaitable[ToolResult]:
        """Return the result of a call, as `Toolbox.result` does; an awaitable where the function returns one."""
        try:
            tool = self._tools.get(function) or Tool.of(function)
            self._tools[function] = tool
            text = _texted(tool, **_arguments(tool, arguments))
        except BaseException as error:  # SystemExit too: a tool may execute code that a model wrote
            return _wrong(error, max_output_chars)
        if inspect.isawaitable(text):
            return self._awaited(tool, text, max_output_chars)
        return capped(text, max_output_chars)

    async def _awaited(self, tool: Tool, value: Awaitable[Any], max_output_chars: int) -> ToolResult:
        try:
            return capped(_as_text(tool.spec.name, await value), max_output_chars)
        except BaseException as error:
            return _wrong(error, max_output_chars)


RUNNER = pickle.dumps(ToolRunner())


def _wrong(error: BaseException, max_output_chars: int) -> ToolResult:
    """Return what the policy reads of an error."""
    if not isinstance(error, Exception):
        error = RuntimeError(f"{type(error).__name__}: {error}")
    text = str(error) if isinstance(error, _WrongCall) else described(error)
    return capped(f"Error: {text}", max_output_chars, is_error=True)


def _arguments(tool: Tool, arguments: str) -> Mapping[str, Any]:
    try:
        return tool.arguments.validate_json(arguments or "{}")
    except ValidationError as error:
        raise _WrongCall(f"the arguments of {tool.spec.name} are wrong: {_explained(error)}") from error


class _WrongCall(Exception):
    """The policy called something that is not there, or not so."""


def _explained(error: ValidationError) -> str:
    problems: list[str] = []
    for detail in error.errors(include_url=False):
        where = ".".join(map(str, detail["loc"]))
        shown_input = "" if detail["type"] == "missing" else f" (given: {detail['input']!r:.80})"
        problems.append(f"{where}: {detail['msg']}{shown_input}" if where else f"{detail['msg']}{shown_input}")
    return "; ".join(problems)


def _as_text(name: str, value: object) -> str:
    """A text as it is, anything else as JSON."""
    if isinstance(value, str):
        return value
    try:
        return to_json(value).decode()
    except PydanticSerializationError as error:
        raise TypeError(f"{name} returned {type(value).__name__}, which is neither a text nor JSON") from error


class ToolEnvironment:
    """Answers a turn's tool calls with their results as messages. A turn without a call ends the episode, and
    rollout.reward scores it.

    Example:
        toolbox = Toolbox([search, add])
        chat = ChatTurns(tokenizer, toolbox.specs())
        MultiTurn(lambda prompt: ToolEnvironment(toolbox), tokenizer, max_turns=8, chat=chat)
    """

    def __init__(self, tools: Tools, *, in_order: bool = False):
        """`in_order`: the calls of a turn run one after another, and not concurrently."""
        self._tools, self._in_order = tools, in_order

    async def step(self, turn: Turn, /) -> Step:
        if turn.tool_calls is None:
            raise ValueError("a ToolEnvironment reads the tool calls of a turn, which needs MultiTurn(chat=...)")
        if self._in_order:
            results = [await self._tools.result(call) for call in turn.tool_calls]
        else:
            results = await asyncio.gather(*(self._tools.result(call) for call in turn.tool_calls))
        messages = [
            Message(role=Role.tool, content=result.text, call_id=call.call_id)
            for call, result in zip(turn.tool_calls, results, strict=True)
        ]
        return Step(
            observation=messages,
            done=not turn.tool_calls,
            counts={
                "tool_calls": len(results),
                "tool_errors": sum(result.is_error for result in results),
                "cut_tool_results": sum(result.is_cut for result in results),
            },
        )
