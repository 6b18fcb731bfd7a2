"""The files of this machine that a program needs, so that a sandbox can show these and no others."""

import os
import shlex
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout.environments.sandbox.launching import ALTERNATIVES, SHOWN, is_shown

MAX_LINKS = 40
"""The most links that are followed, as in the kernel."""
SHEBANG_BYTES = 256


@dataclass(frozen=True, slots=True, order=True)
class Shown:
    """A path of this machine as a sandbox has it, under the same name."""

    path: str
    link: str | None = None
    """The target, where the path is a link that stands alone; else the file or folder is shown as it is."""

    @property
    def source(self) -> str:
        """The file or folder itself, without links on the way to it."""
        return os.path.realpath(self.path)

    @property
    def words(self) -> tuple[str, ...]:
        """Arguments of bwrap."""
        if self.link is not None:
            return ("--symlink", self.link, self.path)
        return ("--ro-bind", self.source, self.path)


def shown_for(command: str, folders: Sequence[str]) -> list[Shown]:
    """Return what a command of the shell needs beyond the system's folders: the programs and files that its words name,
    and these folders."""
    shown = {Shown(os.path.abspath(os.path.expanduser(folder))) for folder in folders}
    for word in words_of(command):
        path = shutil.which(word) if "/" not in word else word
        if path is not None and os.path.isabs(path) and os.path.isfile(path):
            shown |= needed(Path(path))
    return outermost(shown)


def words_of(command: str) -> list[str]:
    """Return the words of a command, as far as they can be told without running it."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return list(lexer)
    except ValueError:  # quotes that only the shell understands
        return command.split()


def outermost(shown: Iterable[Shown]) -> list[Shown]:
    """Return those that are in no folder of the others."""
    folders = {each.path for each in shown if each.link is None}
    return sorted(each for each in shown if not any(str(parent) in folders for parent in Path(each.path).parents))


def needed(program: Path) -> set[Shown]:
    """Return what a program needs: each link on the way to it, the packages beside it, and its interpreter."""
    shown: set[Shown] = set()
    for _ in range(MAX_LINKS):
        folder = package_of(program)
        target = os.path.normpath(program.parent / os.readlink(program)) if program.is_symlink() else None
        stands_alone = target is not None and folder == program
        if not _is_of_system(program):
            shown.add(Shown(str(program), target) if stands_alone else Shown(str(folder)))
        if target is None:
            break
        program = Path(target)
    real = program.resolve()  # a folder on the way may be a link, too
    if not _is_of_system(real):
        shown.add(Shown(str(package_of(real))))
    return shown | _of_interpreter(real)


def _is_of_system(path: Path) -> bool:
    """Return whether all sandboxes without an image have a path, which may be a link to elsewhere."""
    if path.is_relative_to(ALTERNATIVES):
        return True
    return any(path.is_relative_to(name) for name in SHOWN) and is_shown(path.parent)


def package_of(path: Path) -> Path:
    """Return the folder without which a program cannot run: the outermost node_modules, or the virtual environment or
    installation of Python that it is in; else the program itself."""
    for parent in reversed(path.parents):
        if parent.name == "node_modules":
            return parent
    root = path.parent.parent
    is_python = (root / "pyvenv.cfg").is_file() or any(root.glob("lib/python3*/os.py"))
    return root if path.parent.name == "bin" and is_python else path


def _of_interpreter(script: Path) -> set[Shown]:
    """Return what the interpreter needs that the first line of a script names."""
    try:
        with script.open("rb") as file:
            first = file.read(SHEBANG_BYTES).partition(b"\n")[0]
    except OSError:
        return set()
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    if words and os.path.basename(words[0]) == "env":
        words = [path for word in words[1:] if (path := shutil.which(word)) is not None]
    return needed(Path(words[0])) if words and os.path.isfile(words[0]) else set()
