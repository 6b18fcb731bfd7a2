"""An example harness: it solves a word problem with a calculator, over the SDK of OpenAI.

rollout.agent=rollout.environments.solver:agent
"""

import ast
import math
import operator
from dataclasses import asdict
from typing import Any

from rollout.agents.tools import Toolbox
from rollout.chat.messages import ToolCall

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
MAX_CHARS = 100


def calculator(expression: str) -> str:
    """Computes an expression of numbers, + - * / and parentheses."""
    if len(expression) > MAX_CHARS:
        raise ValueError(f"an expression has at most {MAX_CHARS} characters")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    if not math.isfinite(value):
        raise ValueError(f"the result {value} is not a finite number")
    return f"{int(value) if value == int(value) else value}"


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_value(left), _value(right))
    raise ValueError(f"only numbers and + - * / ( ) are allowed, not {ast.unparse(node)}")


TOOLBOX = Toolbox([calculator], call_timeout_s=5.0, max_output_chars=200)
TOOLS = [{"type": "function", "function": asdict(spec)} for spec in TOOLBOX.specs()]


async def agent(task: Any, client: Any) -> None:
    """Ask, run the tools that the policy calls, and ask again, until an answer calls none: rollout.reward scores it.

    `client` is an openai.AsyncOpenAI of this episode.
    """
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    while True:
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        reply = answer.choices[0].message
        if not reply.tool_calls:
            return
        messages.append(reply)
        for call in reply.tool_calls:
            call_made = ToolCall(call_id=call.id, name=call.function.name, arguments=call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": await TOOLBOX.call(call_made)})
