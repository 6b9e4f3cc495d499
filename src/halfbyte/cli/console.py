"""What commands print with: a console that does not fold tables when its output is piped, and that shows text of
unknown origin (a source name, a path, a recipe) as it is, neither as markup nor as commands to the terminal; and a bar
for long work."""

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfbyte.inputs.names import printable

PIPED_WIDTH = 160


class PlainConsole(Console):
    """A rich console to which every string is text. Style is given by `style=` or by a `Text`, never by markup."""

    def __init__(self, **settings: Any):
        super().__init__(**{"markup": False, "highlight": False, "emoji": False, **settings})

    def on_broken_pipe(self) -> None:
        """A reader that went away is the program's to handle; rich would end it with exit code 1."""
        raise BrokenPipeError

    def say(self, text: str) -> None:
        """Print a line, which the terminal folds."""
        self.print(text, soft_wrap=True)

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(printable(text), **{**settings, "markup": False})


def console() -> Console:
    """A console on the present stdout; as wide as the terminal, or wide enough for any table when piped."""
    return PlainConsole(file=sys.stdout, width=None if sys.stdout.isatty() else PIPED_WIDTH)


def say(text: str, *, file: TextIO | None = None) -> None:
    """Print a line for people, whatever names are in it."""
    print(printable(text), file=file, flush=True)


def note(text: str) -> None:
    """For people beside a command's output: on stderr, so that a pipe gets the output alone."""
    say(text, file=sys.stderr)


def shown(text: str) -> str:
    """Text of a data set or a model for stdout: a terminal gets control characters spelled out, a pipe every byte."""
    return printable(text) if sys.stdout.isatty() else text


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None, numbers: int | None = None
) -> Table:
    """A plain table: a rule under the head, no side borders, the first column in bold; columns from `numbers` on are
    flush right."""
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for place, column in enumerate(columns):
        right = numbers is not None and place >= numbers
        style = "bold" if place == 0 else ""
        made.add_column(column, style=style, justify="right" if right else "left", no_wrap=place == 0 or right)
    for row in rows:
        made.add_row(*map(str, row))
    return made


@contextmanager
def progress(name: str) -> Iterator[Any]:
    """A bar on stderr if that is a terminal; yields the function that sets it to (done, of all)."""
    import rich.progress
    from rich.markup import escape

    columns = (*rich.progress.Progress.get_default_columns(), rich.progress.MofNCompleteColumn())
    screen = Console(stderr=True)
    with rich.progress.Progress(*columns, console=screen, disable=not screen.is_terminal, transient=True) as bar:
        task = bar.add_task(escape(printable(name)), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class MayClose:
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
