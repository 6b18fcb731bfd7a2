"""Folders of the commands of rollout.agent_command: one for each episode, removed when the episode has ended."""

import asyncio
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from configs.rollout import SessionsConfig

logger = logging.getLogger(__name__)
PROMPT = "prompt.txt"
HOME = "home"


@dataclass(slots=True)
class EpisodeFolder:
    path: Path
    home: Path | None
    """The working directory and HOME of the command; None leaves it those of the agent worker."""
    stdout: bytes = b""
    stderr: bytes = b""
    """`stdout` and `stderr`: the last bytes that the command has written, which are put into a folder that is kept."""

    @property
    def prompt(self) -> Path:
        """The file with the prompt. It is not in `home`, where the agent works."""
        return self.path / PROMPT

    def write_output(self) -> None:
        """Write the output of the command into the folder. The command may have removed the folder, or have filled the
        disk."""
        try:
            (self.path / "stdout.txt").write_bytes(self.stdout)
            (self.path / "stderr.txt").write_bytes(self.stderr)
        except OSError as error:
            logger.warning("the output of a command cannot be kept: %s", error)


class EpisodeFolders:
    """Makes and removes folders. Those of the first `sessions.kept_folders` episodes that fail are kept.

    Example:
        folder = await folders.make("What is 6 times 7?", {})
        await folders.end(folder, has_failed=False)
    """

    def __init__(self, config: SessionsConfig):
        self._template = None if config.folder_template is None else Path(config.folder_template).expanduser()
        self._is_fresh, self._num_left = config.fresh_folder, config.kept_folders

    async def make(self, prompt: str, files: Mapping[str, str]) -> EpisodeFolder:
        """Return a folder with the prompt, and with these files in its HOME. Raises OSError."""
        return await asyncio.to_thread(self._make, prompt, files)

    def _make(self, prompt: str, files: Mapping[str, str]) -> EpisodeFolder:
        path = Path(tempfile.mkdtemp(prefix="slipstream-episode-"))
        folder = EpisodeFolder(path, path / HOME if self._is_fresh else None)
        try:
            folder.prompt.write_bytes(as_bytes(prompt))
            if folder.home is not None:
                if self._template is None:
                    folder.home.mkdir()
                else:
                    shutil.copytree(self._template, folder.home, symlinks=True)
                for name, text in files.items():
                    (folder.home / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder.home / name).write_text(text, encoding="utf-8")
        except BaseException:
            _remove(path)
            raise
        return folder

    async def end(self, folder: EpisodeFolder, has_failed: bool) -> None:
        """Remove the folder, or keep that of an episode that has failed."""
        if has_failed and self._num_left > 0:
            self._num_left -= 1
            logger.warning("the folder of an episode that failed is kept: %s", folder.path)
            await asyncio.to_thread(folder.write_output)
            return
        await asyncio.to_thread(_remove, folder.path)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():  # something was made read-only, as caches of packages are
            for parent, folders, _ in os.walk(path):
                for name in folders:
                    if not os.path.islink(folder := os.path.join(parent, name)):
                        os.chmod(folder, stat.S_IRWXU)
            shutil.rmtree(path)
    except (OSError, RecursionError) as error:
        logger.warning("the folder of an episode cannot be removed: %s: %s", path, error)


def as_bytes(prompt: str) -> bytes:
    """Return the text in UTF-8. Half of a surrogate pair, which UTF-8 cannot hold, is written as an escape."""
    return prompt.encode("utf-8", "backslashreplace")
