"""Rewriting somebody else's function: origins of values, a plan, its execution, and a report."""

from halfbyte.ops.rewrite.api import Rewritten, apply_recipe
from halfbyte.ops.rewrite.report import Report, Site
