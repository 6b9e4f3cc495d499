"""GEMM FLOPs that a step needs, and the GEMMs of its compiled program that multiply them."""

from halfbyte import models
from halfbyte.models.config import EXPERT_SITES, SHARED_SITES
from halfbyte.program import Gemm, Program, category, gemms
from halfbyte.train import TrainConfig

from .load import NONE, Load

GATE_UP = tuple(f"layers/mlp/{name}" for name in ("gate", "up", *SHARED_SITES[:2]))
EXPERTS = tuple(f"layers/mlp/{name}" for name in EXPERT_SITES)  # down's result too: its weight's gradient reads it
ROUTER = "layers/mlp/router"
AGAIN = {
    "none": (),
    "dots": (),
    "quantized": GATE_UP,
    "full": (*(f"layers/attention/{name}" for name in "qkvo"), *GATE_UP, *EXPERTS),
}
"""Linears whose forward GEMM the backward pass runs again, by remat policy."""


def needed_flops(config: TrainConfig) -> dict[str, int]:
    """GEMM FLOPs of a whole step by linear and router: forward, both gradients, and what its remat policy repeats."""
    again, model = AGAIN[config.remat], config.model
    sites = models.gemm_sites(model, config.batch, config.seq)
    needed = {site.path: site.flops // 3 * (4 if site.path in again else 3) for site in sites}
    if model.experts:
        each = 2 * model.layers * config.batch * config.seq * model.embed * model.experts
        needed[ROUTER] = each * (4 if config.remat == "full" else 3)
    return needed


def linear_gemms(program: Program, load: Load = NONE) -> list[Gemm]:
    """The GEMMs of a program that are not attention's, under the `load` of its experts."""
    found = gemms(program, turns=load.turns, branches=load.branches)
    return [gemm for gemm in found if category(program, gemm.instruction) == "gemm"]
