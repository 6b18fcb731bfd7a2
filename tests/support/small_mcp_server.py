"""An MCP server by hand, over its standard input and output, of the protocol of 2025-06-18. It starts at once."""

import json
import os
import sys
import time
from typing import Any

PARAMETERS = {"note": "text", "variable": "name", "wait": "seconds", "crash": ""}
"""The tools, and what each takes."""
kept: list[str] = []


def call(name: str, given: str) -> str:
    if name == "crash":
        os._exit(1)
    if name == "wait":
        time.sleep(float(given))
        return "done"
    if name == "variable":
        return os.environ.get(given, "none")
    kept.append(given)
    return " ".join(kept)


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """None for a method that it does not know."""
    if method == "initialize":
        info = {"name": "small", "version": "1"}
        return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in PARAMETERS]}
    if method == "tools/call":
        text = call(params["name"], params["arguments"].get(PARAMETERS[params["name"]], ""))
        return {"content": [{"type": "text", "text": text}]}
    return None


if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        result = answer(request["method"], request.get("params", {}))
        outcome = {"error": {"code": -32601, "message": "Method not found"}} if result is None else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **outcome}), flush=True)
