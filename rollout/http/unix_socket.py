"""A Unix socket that can be opened through a folder, however long the path of the folder is."""

import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BACKLOG = 16


@contextmanager
def linked_socket(link: Path) -> Iterator[socket.socket]:
    """Listen on a socket that only this user can use, and make `link` point to it. Both are removed afterwards.

    The path of a socket has at most 107 bytes, so it lies in a private folder under /tmp.
    """
    folder = Path(tempfile.mkdtemp(prefix="slipstream-", dir="/tmp"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            path = folder / "socket"
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(BACKLOG)
            link.unlink(missing_ok=True)
            link.symlink_to(path)
            yield listener
        finally:
            link.unlink(missing_ok=True)
            shutil.rmtree(folder)
