"""The terminal of a chat: lines in, pieces of an answer out. Knows nothing of models.

On a terminal lines are edited with prompt_toolkit (history, completion of commands, several lines);
from a pipe they are read as they are, so that a chat can be scripted.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

from tp_runtime.launch.chat_commands import COMMANDS

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

PROMPT = "> "
_DIM, _RED, _PLAIN = "\x1b[2m", "\x1b[31m", "\x1b[0m"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""A model's text must not move the cursor, change the title or ring the bell."""


class Terminal:
    """Colours only where standard output is a terminal."""

    def __init__(self) -> None:
        self._coloured = sys.stdout.isatty()
        self._session: PromptSession[str] | None = None
        if sys.stdin.isatty() and sys.stdout.isatty():
            self._session = _editing_session()

    @property
    def interactive(self) -> bool:
        return self._session is not None

    def read(self) -> str:
        """The next line; EOFError at the end, KeyboardInterrupt for Ctrl-C."""
        if self._session is not None:
            return self._session.prompt(PROMPT)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def write(self, text: str) -> None:
        """A piece of an answer, shown at once."""
        print(_CONTROL.sub("", text), end="", flush=True)

    def note(self, text: str) -> None:
        """What the program itself says."""
        self._line(text, _DIM)

    def error(self, text: str) -> None:
        self._line(text, _RED)

    def _line(self, text: str, colour: str) -> None:
        if self._coloured:
            text = f"{colour}{text}{_PLAIN}"
        print(text, flush=True)


def _editing_session() -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import InMemoryHistory

    return PromptSession(
        history=InMemoryHistory(),  # what was said is nobody's business after the end
        completer=WordCompleter([*COMMANDS], sentence=True),
        complete_while_typing=False,
        key_bindings=_keys(),
    )


def _keys() -> Any:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return keys
