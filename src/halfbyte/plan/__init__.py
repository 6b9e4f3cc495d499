"""Plan a training step on a cluster (compile, parse, simulate), and measure its time and memory on this device."""

from typing import TYPE_CHECKING

from halfbyte.renamed import old_names

if TYPE_CHECKING:
    from halfbyte.plan.cluster_model import make_cluster, place_run
    from halfbyte.plan.compiled_step import can_compile, profile_from_config, profile_step
    from halfbyte.plan.layout_search import search_layouts
    from halfbyte.plan.plan_outcome import evaluate_plan, overhead_of, parse_tokens, problems
    from halfbyte.plan.rate_calibration import FITTED_RATES, FORMS_TRIED
    from halfbyte.plan.simulator import Timeline, simulate_step
    from halfbyte.plan.step_placement import compile_step, needed_flops, peak_bytes

# Submodule -> names that are imported when they are first used.
_LATER = {
    "cluster_model": ("make_cluster", "place_run"),
    "compiled_step": ("profile_from_config", "can_compile", "profile_step"),
    "layout_search": ("search_layouts",),
    "plan_outcome": ("evaluate_plan", "overhead_of", "problems", "parse_tokens"),
    "rate_calibration": ("FITTED_RATES", "FORMS_TRIED"),
    "simulator": ("Timeline", "simulate_step"),
    "step_placement": ("peak_bytes", "compile_step", "needed_flops"),
}

if not TYPE_CHECKING:
    __getattr__ = old_names(__name__, _LATER)
