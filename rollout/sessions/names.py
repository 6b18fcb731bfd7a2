"""Names of a session's generations, as harnesses see them and send them back."""

import re
from dataclasses import dataclass, field
from hashlib import sha256


@dataclass(frozen=True, slots=True)
class Names:
    """Two sessions have different names, and a name says which generation it is of. Letters, digits and "_" only.

    Example: Names("a").call_id(3, 0) == "call_3_0_ca978112", and Names("a").number("call_3_0_ca978112") == 3
    """

    session: str
    _mark: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_mark", sha256(self.session.encode()).hexdigest()[:8])

    def answer_id(self, number: int) -> str:
        """Of an answer. It also is what a thinking block is signed with."""
        return f"gen_{number}_{self._mark}"

    def call_id(self, number: int, index: int) -> str:
        """Of the tool call `index` in the answer of generation `number`."""
        return f"call_{number}_{index}_{self._mark}"

    def number(self, name: str) -> int | None:
        """The generation that `name` is of; None if it is no name of this session. A dialect may put a prefix and "_"
        or "-" before it, as in "chatcmpl-gen_3_ca978112"."""
        found = re.fullmatch(rf"(?:.*[-_])?(?:gen_(\d{{1,9}})|call_(\d{{1,9}})_\d+)_{self._mark}", name)
        return None if found is None else int(found[1] or found[2])
