"""What commands print with: a console that does not fold tables when its output is piped."""

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

PIPED_WIDTH = 160


def console() -> Console:
    """A rich console on the present stdout; as wide as the terminal, or wide enough for any table when piped."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> Table:
    """A plain table: a rule under the head, no side borders, the first column in bold."""
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for place, column in enumerate(columns):
        made.add_column(column, style="bold" if place == 0 else "", no_wrap=place == 0)
    for row in rows:
        made.add_row(*map(str, row))
    return made
