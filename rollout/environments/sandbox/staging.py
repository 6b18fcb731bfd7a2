"""Lets a sandbox of root's run see folders that only root may enter, such as /root: a program of its own, which needs
the standard library only.

    python -I -S staging.py PATHS USER COMMAND...

PATHS is a list in JSON. The sandbox is set up by USER, who has no rights (`setpriv` in COMMAND) and may not enter those
folders. So this process takes file systems of its own, in which an empty folder covers each of them that holds one of
the paths, with nothing in it but these paths. What the machine sees stays as it is.
"""

import ctypes
import json
import os
import shutil
import sys
from collections.abc import Iterable

CLONE_NEWNS = 0x20000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
OTHERS_MAY_ENTER = 0o001


def closed_folders(paths: Iterable[str], user: int) -> list[str]:
    """Return the outermost folders around the paths that a user may not enter. The paths have no links in them."""
    closed: set[str] = set()
    for path in paths:
        parts = path.split("/")[1:-1]
        for depth in range(len(parts)):
            folder = "/" + "/".join(parts[: depth + 1])
            status = os.stat(folder)
            if not status.st_mode & OTHERS_MAY_ENTER and status.st_uid != user:
                closed.add(folder)
                break
    return sorted(closed)


def main(paths: list[str], user: int, command: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
        words = [None if word is None else word.encode() for word in (source, target, kind)]
        if libc.mount(*words, ctypes.c_ulong(flags), None if data is None else data.encode()):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)

    program = shutil.which(command[0]) or command[0]  # now: the search imports modules, which may soon be covered
    closed = closed_folders(paths, user)
    covered = [path for path in paths if any(path.startswith(f"{each}/") for each in closed)]
    if libc.unshare(CLONE_NEWNS):
        sys.exit(f"only root may enter {', '.join(closed)}, and this container may mount nothing")
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    sources = {path: os.open(path, os.O_PATH) for path in covered}  # while they can still be seen
    for folder in closed:
        mount("tmpfs", folder, "tmpfs", 0, "mode=755")
    for path in sorted(sources):
        if os.path.isdir(f"/proc/self/fd/{sources[path]}"):
            os.makedirs(path, exist_ok=True)
        elif not os.path.exists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
        mount(f"/proc/self/fd/{sources[path]}", path, None, MS_BIND | MS_REC)
        os.close(sources[path])
    os.execv(program, command)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
