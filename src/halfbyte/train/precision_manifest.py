"""Builds the precision manifest: how every GEMM of the run is computed, written before step 1.

It has one entry per linear and segment of layers: the shape, and for each of the three GEMMs the policies of both
operands, their quantize passes, the backend, the tensor-core format, and whether that is the operands' format (native)
or an exact emulation. What XLA computes is listed as `xla`. `auto` is resolved by the same call as in the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh

from halfbyte import models, ops
from halfbyte.devices import Device, native_training
from halfbyte.distributed import axis_size, default_shape, parse_mesh, total_axis_sizes
from halfbyte.distributed.mesh import ALL_MESH_AXES
from halfbyte.formats import BF16
from halfbyte.models.config import EXPERT_SITES
from halfbyte.models.model_context import LayerContext, ModelContext, is_scanned, uses_stacked_residuals
from halfbyte.models.params import FLOPS_FORMULA
from halfbyte.ops import expert_tiles
from halfbyte.ops.expert_tiles import choose_tile_rows
from halfbyte.ops.grouped_linear import check_grouped_support
from halfbyte.ops.rms_norm_vjp import norm_kernel_refusal
from halfbyte.recipes import OperandPolicy, Recipe, ResolvedPolicy
from halfbyte.train.manifest_entries import (
    TILES_NAME,
    XLA_BACKENDS,
    XLA_NAME,
    GemmEntry,
    LinearEntry,
    PrecisionManifest,
)
from halfbyte.train.train_config import TrainConfig
from halfbyte.train.train_step import make_model_context

FP4_BITS = 4
BF16_UNIT = str(BF16.hardware_unit)


def build_precision_manifest(
    config: TrainConfig, resolved: ResolvedPolicy, recipe: Recipe, *, seq: int, device: Device
) -> PrecisionManifest:
    """Returns the manifest of one precision phase. Raises ValueError if the backend does not support a linear."""
    ops.check_backend(config.precision.backend)
    step = step_shapes(config, resolved, seq=seq, device=device)
    sites = []
    for site in models.linear_shapes(config.model, step.rows, seq):
        for first, last, site_recipe in layer_spans(site, resolved, config.model.layers):
            if site.experts:
                sites.append(
                    _describe_experts(site, (first, last), site_recipe, _expert_recipes(resolved, first, last), step)
                )
            else:
                sites.append(_describe(site, (first, last), site_recipe, step))
    tokens = config.batch * seq
    total = models.flops_per_token(config.model, seq) * tokens
    by_multiplier: dict[str, float] = {}
    four_bit = 0.0
    for entry in sites:
        for gemm in entry.gemms.values():
            by_multiplier[gemm.runs_in] = by_multiplier.get(gemm.runs_in, 0.0) + entry.flops / 3 / total
            four_bit += entry.flops / 3 / total if gemm.bits == FP4_BITS else 0.0
    attention = 1 - sum(by_multiplier.values())
    by_multiplier[BF16_UNIT] = by_multiplier.get(BF16_UNIT, 0.0) + attention
    return PrecisionManifest(
        device=device.name,
        recipe=recipe.name,
        policy=config.policy,
        flops_formula=FLOPS_FORMULA,
        sites=tuple(sites),
        step_flops=total,
        share_4bit=four_bit,
        share_by_multiplier=by_multiplier,
        norms=_norms(step),
    )


@dataclass(frozen=True)
class StepShapes:
    """Shapes of a microbatch: `rows` of `seq` tokens, the model context on an abstract mesh, and the device."""

    config: TrainConfig
    ctx: ModelContext
    specs: dict[str, Any]
    rows: int
    seq: int
    device: Device

    def plan(self, site: models.LinearShape, recipe: Recipe) -> ops.LinearPlan:
        """Plans a linear of a layer with the execution config that the layer has while it is traced."""
        group, name = site.path.removeprefix("layers/").split("/")
        here = LayerContext(self.ctx, self.specs, {site.path: recipe}, {})
        x = jax.ShapeDtypeStruct((self.rows, self.seq, site.k), self.ctx.compute_dtype)
        w = jax.ShapeDtypeStruct((site.k, site.n), jnp.float32)
        return ops.plan_placed_linear(x, w, recipe, here.execution(x, group, (name,), {name: w}), self.device)

    def unplanned(self, site: models.LinearShape, recipe: Recipe) -> ops.LinearProblem:
        """Returns the problem of the head, or of all experts in total: no backend is chosen for their GEMMs."""
        mesh, rules = self.ctx.mesh, self.ctx.rules
        tokens = site.tokens // axis_size(mesh, (*rules.mesh_axes("batch"), *rules.mesh_axes("seq")))
        k, n = (
            size // (1 if name is None or name == "embed" else axis_size(mesh, rules.mesh_axes(name)))
            for size, name in zip((site.k, site.n), site.axes, strict=True)
        )
        return ops.LinearProblem(recipe, tokens, k, n, self.device, dtype=self.config.precision.compute_dtype)


def step_shapes(config: TrainConfig, resolved: ResolvedPolicy, *, seq: int, device: Device) -> StepShapes:
    """Returns the shapes of one microbatch of the run; without a mesh in the config, of fsdp over every device."""
    sizes = total_axis_sizes(parse_mesh(config.mesh) or default_shape(jax.devices()))
    types = (AxisType.Auto,) * len(ALL_MESH_AXES)
    mesh = AbstractMesh(tuple(sizes.get(axis, 1) for axis in ALL_MESH_AXES), ALL_MESH_AXES, types)
    # A plan reads only names and sizes of the mesh axes.
    ctx = make_model_context(config, resolved, cast(Mesh, mesh), None)
    return StepShapes(config, ctx, models.param_specs(config.model), config.batch // config.accumulate, seq, device)


def _norms(step: StepShapes) -> str:
    ctx, model = step.ctx, step.config.model
    looped = is_scanned(model, ctx.unroll) and not uses_stacked_residuals(ctx.unroll, ctx.remat)
    reason = norm_kernel_refusal(
        (step.rows, step.seq, model.embed), ctx.compute_dtype, looped=looped, device=step.device, mesh=ctx.mesh,
        rules=ctx.rules,
    )  # fmt: skip
    return "kernels" if reason is None else f"{XLA_NAME}: {reason}"


def native_linears(
    manifest: PrecisionManifest, resolved: ResolvedPolicy, *, experts: bool = False
) -> list[tuple[str, Recipe, tuple[int, int, int]]]:
    """Returns (path and layers, recipe, sizes on a device) of each linear that runs on the native backend.

    With `experts`, returns those of the expert linears with native GEMMs instead.
    """
    linears = []
    for site in manifest.sites:
        has_native_gemm = any(gemm.multiplied_by == "native" for gemm in site.gemms.values())
        if (site.backend == TILES_NAME and has_native_gemm) if experts else site.backend == "native":
            first, last = site.layers
            in_layers = site.path.startswith("layers/")
            where = f"{site.path}, layers {first} to {last - 1}" if in_layers else site.path
            linears.append((where, resolved.recipe_at(site.path, first if in_layers else None), site.on_device))
    return linears


def layer_spans(site: models.LinearShape, resolved: ResolvedPolicy, layers: int) -> list[tuple[int, int, Recipe]]:
    """Returns (first, last, recipe) of each run of layers whose linears at this path have one recipe."""
    if not site.path.startswith("layers/"):
        return [(0, 1, resolved.recipe_at(site.path))]
    spans: list[tuple[int, int, Recipe]] = []
    for segment in resolved.segments:
        recipe = segment.recipes[site.path]
        if spans and spans[-1][2] == recipe:
            spans[-1] = (spans[-1][0], segment.stop, recipe)
        else:
            spans.append((segment.start, segment.stop, recipe))
    return spans


def _describe(site: models.LinearShape, layers: tuple[int, int], chosen: Recipe, step: StepShapes) -> LinearEntry:
    try:
        plan = step.plan(site, chosen) if site.path.startswith("layers/") else None
    except ValueError as error:
        raise ValueError(f"{site.path}, layers {layers[0]} to {layers[1] - 1}: {error}") from None
    problem = step.unplanned(site, chosen) if plan is None else plan.problem
    choice = plan.choice if plan is not None and chosen.quantized else None
    gemms = gemm_entries(problem, choice, ahead=step.config.accumulate > 1)
    passed_over = {} if choice is None else ops.rejected_backends(problem, choice.name)
    backend = XLA_NAME if choice is None else choice.name
    flops = 6.0 * (layers[1] - layers[0]) * site.tokens * site.k * site.n * step.config.accumulate
    on_device = problem.tokens, problem.inputs, problem.outputs
    return LinearEntry(
        site.path, layers, site.tokens, site.k, site.n, chosen.name, backend, gemms, flops, passed_over, on_device
    )


def _expert_recipes(resolved: ResolvedPolicy, first: int, last: int) -> list[Recipe]:
    """Returns the recipes of all expert linears in layers [first, last), which share their tiles."""
    segments = (segment for segment in resolved.segments if first <= segment.start < last)
    return [segment.recipes[f"layers/mlp/{name}"] for segment in segments for name in EXPERT_SITES]


def _describe_experts(
    site: models.LinearShape, layers: tuple[int, int], chosen: Recipe, beside: Sequence[Recipe], step: StepShapes
) -> LinearEntry:
    problem, device, sides = step.unplanned(site, chosen), step.device, (site.k, site.n)
    backend = step.config.precision.backend
    check_grouped_support([chosen], backend)
    # Rows of all experts of a device, on average.
    rows = problem.tokens * problem.inputs * problem.outputs // (site.k * site.n)
    tile, dtypes = choose_tile_rows(rows, site.experts, beside, device=device), (problem.dtype, problem.weight_dtype)
    reason = expert_tiles.block_scaled_refusal(chosen, sides, device, backend=backend, tile=tile, dtypes=dtypes)
    gemms = gemm_entries(problem, None, sides=sides, scaled=reason is None)
    native_expected = backend == "auto" and chosen.quantized and native_training(device, "nvfp4")
    rejected = {"native": reason} if native_expected and reason else {}
    flops = 6.0 * (layers[1] - layers[0]) * site.tokens * site.k * site.n * step.config.accumulate
    on_device = rows, site.k, site.n
    return LinearEntry(
        site.path, layers, site.tokens, site.k, site.n, chosen.name, TILES_NAME, gemms, flops, rejected, on_device
    )


def gemm_entries(
    problem: ops.LinearProblem, choice: ops.BackendChoice | None, *, ahead: bool = False,
    sides: tuple[int, int] | None = None, scaled: bool = False,
) -> dict[str, GemmEntry]:  # fmt: skip
    """Returns the entries of the GEMMs of a linear by name.

    Args:
        choice: backend of the linear; None: XLA in bf16, or the expert tiles.
        ahead: True if weights are quantized before their use (once per step).
        sides: (in, out) of an expert's matrices; None: the linear has no experts.
        scaled: True if expert tiles are multiplied as codes on block-scaled tensor cores.
    """
    return {gemm.name: _gemm(gemm, problem, choice, ahead=ahead, sides=sides, scaled=scaled) for gemm in problem.gemms}


def _gemm(
    gemm: ops.GemmKind, problem: ops.LinearProblem, choice: ops.BackendChoice | None, *, ahead: bool,
    sides: tuple[int, int] | None, scaled: bool,
) -> GemmEntry:  # fmt: skip
    policies = [getattr(problem.recipe, role) for role in gemm.roles]
    backend, passes = XLA_NAME, tuple(XLA_NAME for _ in gemm.roles)
    if choice is not None:
        backend, passes = (
            choice.gemm_backend(gemm).name,
            tuple(choice.operand_passes(role, ahead=ahead) for role in gemm.roles),
        )
    elif scaled:
        backend, passes = "native", tuple("native" for _ in gemm.roles)
    elif sides is not None:
        backend = "fused" if expert_tiles.has_grouped_gemm_kernel(*sides, device=problem.device) else "reference"
        has_kernel = [
            expert_tiles.has_quantize_kernel(role, getattr(problem.recipe, role), sides, problem.device)
            for role in gemm.roles
        ]
        passes = tuple("fused" if fused else XLA_NAME for fused in has_kernel)
    is_emulated = sides is not None and not scaled  # expert tiles are multiplied in bf16, in any format
    runs_in = BF16_UNIT if is_emulated else _multiplier((policies[0], policies[1]), backend, problem.device)
    return GemmEntry(
        left=f"{policies[0]}{_extra_x_terms(gemm, problem.recipe)}",
        right=str(policies[1]),
        bits=max(policy.format.element.bits if policy.format.element else 16 for policy in policies),
        runs_in=runs_in,
        execution=_execution((policies[0], policies[1]), runs_in),
        multiplied_by=XLA_NAME if backend in XLA_BACKENDS else backend,
        made_by=passes,
    )


def _extra_x_terms(gemm: ops.GemmKind, recipe: Recipe) -> str:
    """Returns the part of the x operand that its policy does not name: the remainder of a two-term operand."""
    return " and of what that leaves over" if recipe.remainder and gemm is ops.gemm_problem.FPROP else ""


def _multiplier(policies: tuple[OperandPolicy, OperandPolicy], backend: str, device: Device) -> str:
    """Returns the tensor-core format: that of both formats if the backend uses it and the device trains on it.

    Else returns bf16. Per-tensor formats run in their own tensor-core format under every backend but the reference.
    """
    left, right = (policy.format for policy in policies)
    used = backend == "native" or (left.block is None and backend != "reference")
    if (
        left.hardware_unit is not None
        and left.hardware_unit == right.hardware_unit
        and used
        and native_training(device, left.hardware_unit)
    ):
        return left.hardware_unit
    return BF16_UNIT


def _execution(policies: tuple[OperandPolicy, OperandPolicy], runs_in: str) -> str:
    if not any(policy.format.quantized for policy in policies):
        return "plain"
    return "native" if runs_in != BF16_UNIT else "emulated"
