"""Console output, errors, exit codes and `--json` results of the commands.

The console does not fold tables when its output is piped. It prints text of unknown origin (a source name, a path, a
recipe) as it is, neither as markup nor as terminal commands. Errors are one paragraph on stderr.
"""

import errno
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfbyte.io.validation import escape_control_chars

PIPED_WIDTH = 160


EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_NOT_PASSED = 3
EXIT_PREEMPTED = 75


class PlainConsole(Console):
    """A rich console to which every string is text. Style is given by `style=` or by a `Text`, never by markup."""

    def __init__(self, **settings: Any):
        super().__init__(**{"markup": False, "highlight": False, "emoji": False, **settings})

    def on_broken_pipe(self) -> None:
        """Raises BrokenPipeError, which `main` handles. Rich would exit with code 1."""
        raise BrokenPipeError

    def say(self, text: str) -> None:
        """Print text, which is wrapped at words on a terminal; indented lines are commands, which are not wrapped."""
        for line in text.split("\n"):
            self.print(line, soft_wrap=not self.is_terminal or line.startswith("  "))

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(escape_control_chars(text), **{**settings, "markup": False})


def console() -> PlainConsole:
    """A console on the present stdout; as wide as the terminal, or wide enough for any table when piped."""
    return PlainConsole(file=sys.stdout, width=None if sys.stdout.isatty() else PIPED_WIDTH)


def print_line(text: str, *, file: TextIO | None = None) -> None:
    """Print a line for people, whatever names are in it."""
    print(escape_control_chars(text), file=file, flush=True)


def print_paragraph(text: str) -> None:
    """Print a sentence or more, wrapped at words on a terminal; further lines have the indent of the first."""
    text = escape_control_chars(text)
    indent = " " * (len(text) - len(text.lstrip()))
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        wrap = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False, subsequent_indent=indent)
        text = wrap.fill(text)
    print(text, flush=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """Print a table; one that is wider than the terminal is transposed, a column per row."""
    listed, screen = [tuple(map(str, row)) for row in rows], console()
    table = rich_table(columns, listed, title=title)
    if listed and screen.measure(table, options=screen.options.update(max_width=10_000)).maximum > screen.width:
        heads, *cells = zip(columns, *listed, strict=True)
        table = rich_table(heads, cells, title=title)
        for column in table.columns:
            column.no_wrap, column.overflow = False, "fold"
    screen.print(table)


def print_note(text: str) -> None:
    """Prints a remark on stderr, so that a pipe gets only the output."""
    print_line(text, file=sys.stderr)


class WordWrap:
    """Prints text that comes in pieces; on a terminal a word that does not fit begins a new line."""

    def __init__(self, width: int | None):
        self._width, self._column, self._held = width, 0, ""

    def write(self, text: str) -> None:
        """Prints all but the last word, which may go on."""
        words = re.split(r"(\s)", self._held + text)
        self._held = words.pop()
        self._print(words)

    def close(self) -> None:
        self._print([self._held])
        self._held = ""

    def _print(self, words: Sequence[str]) -> None:
        for word in words:
            shown = to_terminal_text(word)
            size = cell_len(shown)
            if self._width and 0 < self._width - self._column < size <= self._width:
                print()
                self._column = 0
            ends = word == "\n" or (word.isspace() and self._column + size >= (self._width or sys.maxsize))
            print("\n" if ends else shown, end="", flush=True)
            self._column = 0 if ends else (self._column + size) % (self._width or sys.maxsize)


def to_terminal_text(text: str) -> str:
    """Text of a data set or a model for stdout: a terminal gets control characters spelled out, a pipe every byte."""
    return escape_control_chars(text) if sys.stdout.isatty() else text


def rich_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None, numbers: int | None = None
) -> Table:
    """A plain table: a rule under the head, no side borders, the first column in bold; columns from `numbers` on are
    flush right."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        right = numbers is not None and index >= numbers
        style = "bold" if index == 0 else ""
        table.add_column(column, style=style, justify="right" if right else "left", no_wrap=index == 0 or right)
    for row in rows:
        table.add_row(*map(str, row))
    return table


@contextmanager
def progress(name: str) -> Iterator[Any]:
    """A bar on stderr if that is a terminal; yields the function that sets it to (done, of all)."""
    import rich.progress
    from rich.markup import escape

    clock = rich.progress.TimeElapsedColumn()  # moves also while the first of many is compiled
    columns = (*rich.progress.Progress.get_default_columns(), rich.progress.MofNCompleteColumn(), clock)
    screen = Console(stderr=True)
    with rich.progress.Progress(*columns, console=screen, disable=not screen.is_terminal, transient=True) as bar:
        task = bar.add_task(escape(escape_control_chars(name)), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class ClosableStream:
    """A stream whose reader may go away (`halfbyte train | head`, a terminal that is closed). Then `on_close` is
    called once, and what is written goes nowhere: losing the reader must not lose the run."""

    def __init__(self, stream: TextIO, *, on_close: Callable[[], None]):
        self._stream, self._on_close, self._open = stream, on_close, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or do nothing once the reader is gone."""
        self._guarded(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush, or do nothing once the reader is gone."""
        self._guarded(self._stream.flush)

    def _guarded(self, act: Callable[[], object]) -> None:
        if not self._open:
            return
        try:
            act()
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            self._open = False
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # Python flushes what is left when it exits
            os.close(nowhere)
            self._on_close()


def say_error(message: str) -> None:
    """One paragraph on stderr, wrapped to the terminal; a message that has lines of its own keeps them. Indented lines
    are commands, which are not wrapped."""
    width = min(110, shutil.get_terminal_size((110, 24)).columns) if sys.stderr.isatty() else 110
    wrap = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False, subsequent_indent="  ")
    lines = escape_control_chars(f"halfbyte: {message}").splitlines()
    filled = (line if line.startswith("  ") else wrap.fill(line) for line in lines)
    print("\n".join(filled), file=sys.stderr, flush=True)


@dataclass(frozen=True)
class CommandResult:
    """Result of a command. `data` is printed by `--json` (anything `json.dumps` takes); `code` is one of EXIT_*."""

    data: Mapping[str, Any] = field(default_factory=dict)
    code: int = EXIT_OK
