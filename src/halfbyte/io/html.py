"""Builds self-contained HTML pages: nothing is loaded from elsewhere, and all text from outside is escaped."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from halfbyte.io.validation import escape_control_chars

STYLE = resources.files("halfbyte.io").joinpath("page.css").read_text(encoding="utf-8")


def escape_html(value: object) -> str:
    """Returns the text escaped for HTML, control characters included."""
    return escape(escape_control_chars(str(value)), quote=True)


def html_page(title: str, body: Iterable[str]) -> str:
    """Returns the HTML document. Its content security policy forbids all requests and scripts."""
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
    """Returns a section: heading and parts; "" if all parts are empty."""
    inside = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape_html(title)}</h2>\n{inside}\n</section>" if inside else ""


def paragraph(words: object, *, soft: bool = False) -> str:
    return f"<p{' class=soft' if soft else ''}>{escape_html(words)}</p>"


def code_block(words: object) -> str:
    """Returns a block of preformatted text, such as a command."""
    return f"<pre>{escape_html(words)}</pre>"


def verdict_box(words: object, *parts: str, kind: str = "") -> str:
    """Returns the box with the verdict of a page, followed by `parts`; `kind`: good, bad or ""."""
    return f'<div class="verdict {kind}"><strong>{escape_html(words)}</strong>{"".join(parts)}</div>'


def notice_box(words: object) -> str:
    """Returns a highlighted notice."""
    return f'<p class="notice"><strong>{escape_html(words)}</strong></p>'


def figure(title: str, svg: str, note: str = "") -> str:
    """Returns an SVG figure with caption and note; "" if `svg` is empty."""
    below = f'<br><span class="soft">{escape_html(note)}</span>' if note else ""
    return f"<figure><figcaption>{escape_html(title)}{below}</figcaption>{svg}</figure>" if svg else ""


def figure_row(title: str, parts: Iterable[str]) -> str:
    """Returns a section with figures in a row."""
    return section(title, '<div class="figures">' + "".join(parts) + "</div>")


def collapsible(title: str, words: str) -> str:
    """Returns collapsed preformatted text under a summary."""
    return f"<details><summary>{escape_html(title)}</summary><pre>{escape_html(words)}</pre></details>"


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table; "" if it has no rows. Numbers do not wrap; PASS, FAIL and CANNOT TELL are colored."""
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
