"""Runs the cells of a notebook as a kernel does: in `__main__`, which has no file, while an event loop runs.

python -m tests.support.cells CELLS.json
"""

import asyncio
import json
import sys
from pathlib import Path
from types import ModuleType


async def kernel(cells: list[str]) -> None:
    main = sys.modules["__main__"] = ModuleType("__main__")
    for number, cell in enumerate(cells, 1):
        exec(compile(cell, f"<cell {number}>", "exec"), vars(main))


if __name__ == "__main__":
    asyncio.run(kernel(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
