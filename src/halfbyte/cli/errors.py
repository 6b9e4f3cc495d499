"""What went wrong, said to a person: one paragraph on stderr."""

import sys
import textwrap

from halfbyte.inputs.names import printable


def say_error(message: str) -> None:
    """One paragraph on stderr, wrapped to the terminal; a message that has lines of its own keeps them."""
    wrap = textwrap.TextWrapper(110, break_long_words=False, break_on_hyphens=False, subsequent_indent="  ")
    lines = printable(f"halfbyte: {message}").splitlines()
    print("\n".join(map(wrap.fill, lines)), file=sys.stderr, flush=True)
