"""The page around the pictures. Nothing is loaded from anywhere, and every word that comes from outside is escaped."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from halfbyte.io.validation import escape_control_chars

STYLE = resources.files("halfbyte.io").joinpath("page.css").read_text(encoding="utf-8")


def escape_html(value: object) -> str:
    """Escaped, with nothing in it that could move a cursor or hide."""
    return escape(escape_control_chars(str(value)), quote=True)


def html_page(title: str, body: Iterable[str]) -> str:
    """The whole document, under its title. Its own policy forbids every request and every script."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<link rel="icon" '
        f'href="data:,">\n<title>{escape_html(title)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n<main>\n'
        + "\n".join([f"<h1>{escape_html(title)}</h1>", *body])
        + "\n</main>\n</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A heading and what belongs under it; nothing if there is nothing."""
    inside = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape_html(title)}</h2>\n{inside}\n</section>" if inside else ""


def paragraph(words: object, *, soft: bool = False) -> str:
    return f"<p{' class=soft' if soft else ''}>{escape_html(words)}</p>"


def code_block(words: object) -> str:
    """Something to be typed."""
    return f"<pre>{escape_html(words)}</pre>"


def verdict_box(words: object, *parts: str, kind: str = "") -> str:
    """What a page says, and what belongs to it; `kind`: good, bad, or neither."""
    return f'<div class="verdict {kind}"><strong>{escape_html(words)}</strong>{"".join(parts)}</div>'


def notice_box(words: object) -> str:
    """Something that must not be overlooked."""
    return f'<p class="notice"><strong>{escape_html(words)}</strong></p>'


def figure(title: str, svg: str, note: str = "") -> str:
    """A picture under its title; nothing if there is nothing to draw."""
    below = f'<br><span class="soft">{escape_html(note)}</span>' if note else ""
    return f"<figure><figcaption>{escape_html(title)}{below}</figcaption>{svg}</figure>" if svg else ""


def figure_row(title: str, parts: Iterable[str]) -> str:
    """A section of pictures side by side."""
    return section(title, '<div class="figures">' + "".join(parts) + "</div>")


def collapsible(title: str, words: str) -> str:
    """Long text, folded."""
    return f"<details><summary>{escape_html(title)}</summary><pre>{escape_html(words)}</pre></details>"


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Numbers do not wrap; the words of a verdict have its colour. Nothing if there is no row."""
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    if not body:
        return ""
    names = "".join(f"<th>{escape_html(name)}</th>" for name in head)
    return f'<div class="scroll"><table>\n<thead><tr>{names}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _cell(value: object) -> str:
    shown = escape_html("" if value is None else value)
    if value in ("PASS", "FAIL", "CANNOT TELL"):
        return f'<td class="{str(value).split()[0]}">{shown}</td>'
    return f'<td class="n">{shown}</td>' if shown[:1] in "+-±0123456789" and len(shown) < 48 else f"<td>{shown}</td>"
