"""Pages that can be forwarded: one HTML file with everything in it, drawn without a script, for screen, phone and
paper."""

from .charts import Axes, Band, Box, Row, Series, forest, heat_map, lanes, line_chart, line_frame, svg_document
from .page import code, details, figure, figures, html_page, notice, paragraph, section, table, text, verdict
