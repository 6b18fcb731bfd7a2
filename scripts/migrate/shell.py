"""Shell scripts, read and not run: their variables, arrays, `${NAME:-default}` and sums, and the words of commands.

What only running tells (`$(...)`, variables of the environment, arguments) is Unknown. Conditions and loops are not
followed: their lines count one after another, as if there were none, and `doubts` says of which variables that decides.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from scripts.migrate.settings import Setting, Unknown, Unread, typed

ASSIGNMENT = re.compile(r"\s*(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?!$-]")
BRACES = re.compile(r"(?P<name>[A-Za-z_]\w*|[0-9@*])(?P<array>\[[@*]\])?(?::?(?P<how>[-=+?])(?P<other>.*))?", re.DOTALL)
OVERRIDE = re.compile(r"\+{0,2}[A-Za-z_][\w./@-]*=")
OPENING, CLOSING = re.compile(r"\s*(if|case|for|while|until)\b"), re.compile(r"(^|[;\s])(fi|esac|done)\b")
ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
REDIRECTION = re.compile(r"[<>]+[&|]?\s*(?:[<>](?=\())?")
IN_A_LINE = re.compile(r"(?:\b(?:then|else|do)|&&|\|\|)\s+(?:export\s+)?([A-Za-z_]\w*)=")
"""An assignment behind a condition in the same line, which is not read."""
MARK = "\0"
"""Encloses, in a word, what is unknown of it."""
MANY = "\1"
"""Begins a word that stands for the words of an array."""
OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
SEPARATORS = ";&|\n"


@dataclass
class Shell:
    """A script, read line by line.

    Example:
        shell = Shell()
        shell.read("n=8\\npython3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=$n")
        shell.commands == [["python3", "-m", "verl.trainer.main_ppo", "actor_rollout_ref.rollout.n=8"]]
    """

    variables: dict[str, str] = field(default_factory=lambda: {"HOME": "~"})
    arrays: dict[str, list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    doubts: dict[str, str] = field(default_factory=dict)
    """Notes on the variables that a condition decides, by their names."""

    def read(self, text: str) -> None:
        depth = 0
        for line in _logical_lines(text):
            is_array = (assignment := ASSIGNMENT.fullmatch(line)) is not None and assignment[3].startswith("(")
            for statement in [line] if is_array else self._statements(line):
                depth += self._take_statement(statement, depth)

    def _statements(self, line: str) -> list[str]:
        """Return the parts of a line between semicolons."""
        parts, start, position = list[str](), 0, 0
        while position < len(line):
            if line[position] == ";":
                parts.append(line[start:position])
                start = position = position + 1
            elif line[position] == "#" and (position == 0 or line[position - 1].isspace()):
                break
            else:
                _, position = self._piece(line, position)
        return [*parts, line[start:]]

    def _take_statement(self, line: str, depth: int) -> int:
        """Take an assignment or commands. Return how many conditions and loops it begins, less those that it ends."""
        assignment = ASSIGNMENT.fullmatch(line)
        if assignment is None:
            self._take_commands(line)
            return bool(OPENING.match(line)) - len(CLOSING.findall(line))
        name, more, value = assignment.groups()
        if value.startswith("("):
            words = self.words(value[1:].rpartition(")")[0].replace("\n", " "))
            self._doubt(name, value, depth)
            self.arrays[name] = [*(self.arrays.get(name, []) if more else []), *words]
            return 0
        words = self.words(value)
        others = [ASSIGNED.fullmatch(word) for word in words[1:]]
        self._doubt(name, value if None in others else words[0] if words else "", depth)
        self.variables[name] = (self.variables.get(name, "") if more else "") + (words[0] if words else "")
        if None in others:  # `NAME=value command ...`
            self._take_commands(line)
            return 0
        for other in filter(None, others):  # `NAME=value OTHER=value`
            self._doubt(other[1], other[2], depth)
            self.variables[other[1]] = other[2]
        return 0

    def _doubt(self, name: str, value: str, depth: int) -> None:
        """Note that a condition or a loop around it decides whether a variable gets this value."""
        if depth > 0 and (before := self.arrays.get(name) or self.variables.get(name)):
            shown = " ".join(before) if isinstance(before, list) else before
            taken = f"{value.strip().replace(MARK, '')} counts here; before it is {shown.replace(MARK, '')}"
            self.doubts[name] = f"set again in a condition or a loop: {taken}"

    def _take_commands(self, line: str) -> None:
        self.doubts |= dict.fromkeys(IN_A_LINE.findall(line), "set in a condition, which is not followed")
        command: list[str] = []
        for word in [*self.words(line, is_command=True), ";"]:
            if word in SEPARATORS:
                self.commands += [command] if command else []
                command = []
            else:
                command.append(word)

    def words(self, line: str, *, is_command: bool = False) -> list[str]:
        """Return the words of a line, with the values of variables in them. Of a command, redirections are left out."""
        words: list[str] = []
        word, position = "", 0
        is_word = False
        while position < len(line):
            character = line[position]
            if is_command and line.startswith("&>", position):
                position += 1
                continue
            if character.isspace() or character in SEPARATORS:
                words += [word] if is_word else []
                words += [character] if character in SEPARATORS and not character.isspace() else []
                word, is_word, position = "", False, position + 1
                continue
            if character == "#" and not is_word:
                break
            if is_command and character in "<>":
                words += [word] if is_word and not word.isdigit() else []
                word, is_word, position = "", False, self._redirected(line, position)
                continue
            piece, position = self._piece(line, position)
            word, is_word = word + piece, True
        words += [word] if is_word else []
        return [inner for each in words for inner in self._spread(each)]

    def _redirected(self, line: str, position: int) -> int:
        """Return where a redirection ends that begins here: `> file`, `2>&1` without its number, `> >(tee file)`."""
        operator = REDIRECTION.match(line, position)
        position = position if operator is None else operator.end()
        if line.startswith("(", position):
            return _closing(line, position, "()") + 1
        while position < len(line) and not line[position].isspace() and line[position] not in f"{SEPARATORS}<>":
            _, position = self._piece(line, position)
        return position

    def _piece(self, line: str, position: int) -> tuple[str, int]:
        """Return the text of what begins at the position, and where it ends."""
        match line[position]:
            case "'":
                end = _find(line, "'", position + 1)
                return line[position + 1 : end], end + 1
            case '"':
                return self._quoted(line, position + 1)
            case "\\":
                return line[position + 1 : position + 2], position + 2
            case "$":
                return self._expanded(line, position + 1)
            case "`":
                end = _find(line, "`", position + 1)
                return _unknown(line[position : end + 1]), end + 1
        return line[position], position + 1

    def _quoted(self, line: str, position: int) -> tuple[str, int]:
        text = ""
        while position < len(line) and line[position] != '"':
            if line[position] == "'":
                piece, position = "'", position + 1
            else:
                piece, position = self._piece(line, position)
            text += piece
        return text, position + 1

    def _expanded(self, line: str, position: int) -> tuple[str, int]:
        """Return the value of what follows a dollar sign, and where it ends."""
        if line.startswith("((", position):
            end = _find(line, "))", position + 2)
            return self._sum(line[position + 2 : end]), end + 2
        if line.startswith("(", position):
            end = _closing(line, position, "()")
            return _unknown(f"${line[position : end + 1]}"), end + 1
        if line.startswith("{", position):
            end = _closing(line, position, "{}")
            return self._braces(line[position + 1 : end]), end + 1
        name = NAME.match(line, position)
        if name is None:
            return "$", position
        return self._value(name[0]), name.end()

    def _braces(self, text: str) -> str:
        match = BRACES.fullmatch(text)
        if match is None:
            return _unknown(f"${{{text}}}")
        name, how = match["name"], match["how"]
        if match["array"]:
            return f"{MANY}{name}"
        if how == "=" and not self.variables.get(name):
            self.variables[name] = self._text(match["other"])
        if how == "-" and not self.variables.get(name):
            return self._text(match["other"])
        if how == "+":
            return self._text(match["other"]) if self.variables.get(name) else ""
        return self._value(name)

    def _text(self, text: str) -> str:
        return "".join(self.words(text))

    def _value(self, name: str) -> str:
        if name in ("@", "*"):
            return ""  # the arguments of the script, of which there are none here
        if name in self.variables:
            return self.variables[name]
        return _unknown(f"${name}")

    def _sum(self, text: str) -> str:
        """Return the value of an arithmetic expression of whole numbers."""
        named = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: self._value(name[1]), text)
        try:
            return str(_computed(ast.parse(named.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return _unknown(f"$(({text}))")

    def _spread(self, word: str) -> list[str]:
        if not word.startswith(MANY):
            return [word]
        name = word.removeprefix(MANY)
        return self.arrays.get(name, [] if name in ("@", "*") else [_unknown(f"${{{name}[@]}}")])


def overrides_of(command: list[str]) -> list[Setting]:
    """Return the settings of a command's words `key=value`, as Hydra takes them."""
    return [_setting(*word.split("=", 1)) for word in command if OVERRIDE.match(word)]


def unread_words(command: list[str]) -> list[Setting]:
    """Return what a command that takes overrides has besides them, after the program."""
    words = command[_program_end(command) :]
    settings: list[Setting] = []
    position = 0
    while position < len(words):
        word, position = words[position], position + 1
        if re.match(r"~\w", word):
            settings.append(Setting(word, Unread("deletes a setting of theirs, and is not read")))
        elif word.replace(MARK, "") and not OVERRIDE.match(word):
            following = words[position : position + 1]
            if word.startswith("-") and "=" not in word and following and not OVERRIDE.match(following[0]):
                word, position = f"{word} {following[0]}", position + 1
            settings.append(Setting(word.replace(MARK, ""), Unread("no setting of a known form: it is not read")))
    return settings


def _program_end(command: list[str]) -> int:
    """Return the place after `-m MODULE` or a script, or else that of the first override."""
    for position, word in enumerate(command):
        if word == "-m":
            return position + 2
        if word.endswith(".py") and not OVERRIDE.match(word):
            return position + 1
        if OVERRIDE.match(word) and "." in word.partition("=")[0]:
            return position
    return len(command)


def options_of(command: list[str]) -> list[Setting]:
    """Return the settings of a command's options: `--key value`, `--key=value`, and `--key` alone for true."""
    settings: list[Setting] = []
    for position, word in enumerate(command):
        if not word.startswith("--"):
            continue
        key, equals, value = word[2:].partition("=")
        texts = [value] if equals else list(_values(command[position + 1 :])) or ["true"]
        values = [_value(text) for text in texts]
        settings.append(Setting(key.replace("-", "_"), values if len(values) > 1 else values[0]))
    return settings


def _values(words: list[str]) -> Iterator[str]:
    for word in words:
        # A script or module stands between the options of its launcher and its own.
        if word.startswith("--") or word.endswith(".py") or word == "-m":
            return
        yield word


def _setting(key: str, text: str) -> Setting:
    return Setting(key.lstrip("+~"), _value(text))


def _value(text: str) -> object:
    return Unknown(text.replace(MARK, "")) if MARK in text or MANY in text else typed(text)


def _logical_lines(text: str) -> Iterator[str]:
    """Yield lines with those that continue them, and arrays with their lines up to the parenthesis that ends them."""
    lines = iter(re.sub(r"\\\r?\n", " ", text).splitlines())
    for line in lines:
        if re.match(r"\s*#", line) or not line.strip():
            continue
        if re.match(r"\s*[A-Za-z_]\w*\+?=\(", line):
            while ")" not in re.sub(r"\$\([^)]*\)|(^|\s)#.*", "", line.partition("=(")[2]):
                following = next(lines, None)
                if following is None:
                    break
                line += "\n" + re.sub(r"(^|\s)#.*", "", following)
        yield line


def _unknown(text: str) -> str:
    return f"{MARK}{text}{MARK}"


def _find(line: str, text: str, start: int) -> int:
    end = line.find(text, start)
    return len(line) if end < 0 else end


def _closing(line: str, start: int, pair: str) -> int:
    depth = 0
    for position in range(start, len(line)):
        depth += {pair[0]: 1, pair[1]: -1}.get(line[position], 0)
        if depth == 0:
            return position
    return len(line)


def _computed(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_computed(inner)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_computed(left), _computed(right))
    raise ValueError(ast.unparse(node))
