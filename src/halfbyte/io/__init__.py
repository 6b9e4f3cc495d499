"""Validated input and atomic output: files, numbers, names and paths from outside, and self-contained HTML pages.

Every limit is stated here or next to the reader that applies it. Refused input is a ValueError, which the command line
turns into one paragraph and exit code 2; `docs/security.md` states the threat model. Names of `html` and `svg_charts`
are imported on first use: one HTML file without scripts, for screen, phone and paper.
"""

from typing import TYPE_CHECKING

from halfbyte.io.files import (
    MAX_JSON_BYTES,
    UnreadableFile,
    atomic_write,
    open_no_follow,
    open_regular_file,
    parse_json,
    read_bytes,
    read_json,
    read_text,
    read_toml,
    read_yaml,
    sealed_json,
    sealed_text,
    write_json,
)
from halfbyte.io.validation import (
    check_choices,
    check_float,
    check_int,
    check_run_name,
    escape_control_chars,
    expand_user,
    refuse_url,
    seconds_of,
    user_cache,
    validated_output_path,
)
from halfbyte.renamed import old_names

if TYPE_CHECKING:
    from halfbyte.io.html import (
        code_block,
        collapsible,
        escape_html,
        figure,
        figure_row,
        html_page,
        html_table,
        notice_box,
        paragraph,
        section,
        verdict_box,
    )
    from halfbyte.io.svg_charts import (
        Axes,
        ConfidenceBand,
        ForestRow,
        LineSeries,
        TimelineBox,
        forest_plot,
        heat_map,
        line_chart,
        line_frame,
        svg_document,
        timeline_chart,
    )

_LATER = {
    "html": (
        "code_block",
        "collapsible",
        "figure",
        "figure_row",
        "html_page",
        "notice_box",
        "paragraph",
        "section",
        "html_table",
        "escape_html",
        "verdict_box",
    ),
    "svg_charts": (
        "Axes",
        "ConfidenceBand",
        "TimelineBox",
        "ForestRow",
        "LineSeries",
        "forest_plot",
        "heat_map",
        "timeline_chart",
        "line_chart",
        "line_frame",
        "svg_document",
    ),
}

if not TYPE_CHECKING:
    __getattr__ = old_names(__name__, _LATER)
