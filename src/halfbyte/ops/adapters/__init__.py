"""Recipes for functions and layers of other libraries: `apply_recipe` and `dot_general`."""

from halfbyte.ops.adapters.jaxpr_rewriter import RewrittenFunction, apply_recipe
from halfbyte.ops.adapters.rewrite_report import DotReport, RewriteReport
