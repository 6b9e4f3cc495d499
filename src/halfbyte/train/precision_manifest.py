"""The precision manifest: what every GEMM of the run really is, before it runs.

One entry a linear and segment of layers: its shape, and for each of its three GEMMs the policies of both operands, the
passes that make them, the backend that multiplies, what its multiplier runs in, and whether that is the format itself
(native) or an exact emulation. What XLA does is written as `xla`. `auto` is resolved here with the same call that the
step makes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

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
    """The manifest of one precision phase. Raises ValueError where a backend cannot serve a site."""
    ops.check_backend(config.precision.backend)
    step = step_shapes(config, resolved, seq=seq, device=device)
    sites = []
    for site in models.linear_shapes(config.model, step.rows, seq):
        for first, last, chosen in layer_spans(site, resolved, config.model.layers):
            if site.experts:
                sites.append(
                    _describe_experts(site, (first, last), chosen, _expert_recipes(resolved, first, last), step)
                )
            else:
                sites.append(_describe(site, (first, last), chosen, step))
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
    """A microbatch of a run: rows of seq tokens, the context of the model on a mesh without devices, and the device."""

    config: TrainConfig
    ctx: ModelContext
    rows: int
    seq: int
    device: Device

    def plan(self, site: models.LinearShape, recipe: Recipe) -> ops.LinearPlan:
        """Plans a linear of the layers, by the execution config that the layer gives it while it is traced."""
        group, name = site.path.removeprefix("layers/").split("/")
        here = LayerContext(self.ctx, models.param_specs(self.config.model), {site.path: recipe}, {})
        x = jax.ShapeDtypeStruct((self.rows, self.seq, site.k), self.ctx.compute_dtype)
        w = jax.ShapeDtypeStruct((site.k, site.n), jnp.float32)
        return ops.plan_placed_linear(x, w, recipe, here.execution(x, group, (name,), {name: w}), self.device)

    def unplanned(self, site: models.LinearShape, recipe: Recipe) -> ops.LinearProblem:
        """Returns the problem of the head, or of all experts together, whose GEMMs no backend is chosen for."""
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
    # Names and sizes of the axes are all that a plan reads of the mesh.
    ctx = make_model_context(config, resolved, cast(Mesh, mesh), None)
    return StepShapes(config, ctx, config.batch // config.accumulate, seq, device)


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
    """(path and layers, recipe, sizes on a device) of each linear that the native backend serves; or of each whose
    `experts` have native GEMMs."""
    found = []
    for site in manifest.sites:
        by_units = any(gemm.multiplied_by == "native" for gemm in site.gemms.values())
        if (site.backend == TILES_NAME and by_units) if experts else site.backend == "native":
            first, last = site.layers
            layered = site.path.startswith("layers/")
            where = f"{site.path}, layers {first} to {last - 1}" if layered else site.path
            found.append((where, resolved.recipe_at(site.path, first if layered else None), site.on_device))
    return found


def layer_spans(site: models.LinearShape, resolved: ResolvedPolicy, layers: int) -> list[tuple[int, int, Recipe]]:
    """Returns (first, last, recipe) of each run of layers whose linears at this path have one recipe."""
    if not site.path.startswith("layers/"):
        return [(0, 1, resolved.recipe_at(site.path))]
    spans: list[tuple[int, int, Recipe]] = []
    for segment in resolved.segments:
        chosen = segment.recipes[site.path]
        if spans and spans[-1][2] == chosen:
            spans[-1] = (spans[-1][0], segment.stop, chosen)
        else:
            spans.append((segment.start, segment.stop, chosen))
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
    own = problem.tokens, problem.inputs, problem.outputs
    return LinearEntry(
        site.path, layers, site.tokens, site.k, site.n, chosen.name, backend, gemms, flops, passed_over, own
    )


def _expert_recipes(resolved: ResolvedPolicy, first: int, last: int) -> list[Recipe]:
    """Of the linears that share the tiles of these layers."""
    segments = (segment for segment in resolved.segments if first <= segment.start < last)
    return [segment.recipes[f"layers/mlp/{name}"] for segment in segments for name in EXPERT_SITES]


def _describe_experts(
    site: models.LinearShape, layers: tuple[int, int], chosen: Recipe, beside: Sequence[Recipe], step: StepShapes
) -> LinearEntry:
    problem, device, sides = step.unplanned(site, chosen), step.device, (site.k, site.n)
    backend = step.config.precision.backend
    check_grouped_support([chosen], backend)
    rows = problem.tokens * problem.inputs * problem.outputs // (site.k * site.n)  # of all its experts, on average
    tile, dtypes = choose_tile_rows(rows, site.experts, beside, device=device), (problem.dtype, problem.weight_dtype)
    reason = expert_tiles.block_scaled_refusal(chosen, sides, device, backend=backend, tile=tile, dtypes=dtypes)
    gemms = gemm_entries(problem, None, sides=sides, scaled=reason is None)
    wanted = backend == "auto" and chosen.quantized and native_training(device, "nvfp4")
    passed = {"native": reason} if wanted and reason else {}
    flops = 6.0 * (layers[1] - layers[0]) * site.tokens * site.k * site.n * step.config.accumulate
    own = rows, site.k, site.n
    return LinearEntry(
        site.path, layers, site.tokens, site.k, site.n, chosen.name, TILES_NAME, gemms, flops, passed, own
    )


def gemm_entries(
    problem: ops.LinearProblem, choice: ops.BackendChoice | None, *, ahead: bool = False,
    sides: tuple[int, int] | None = None, scaled: bool = False,
) -> dict[str, GemmEntry]:  # fmt: skip
    """The GEMMs of a linear that `choice` serves (None: XLA, in bf16, or the tiles of experts whose matrices have these
    `sides`, multiplied as codes if `scaled`); weights may be made `ahead` of their use."""
    return {gemm.name: _gemm(gemm, problem, choice, ahead=ahead, sides=sides, scaled=scaled) for gemm in problem.gemms}


def _gemm(
    gemm: ops.GemmKind, problem: ops.LinearProblem, choice: ops.BackendChoice | None, *, ahead: bool,
    sides: tuple[int, int] | None, scaled: bool,
) -> GemmEntry:  # fmt: skip
    policies = [getattr(problem.recipe, role) for role in gemm.roles]
    backend, makers = XLA_NAME, tuple(XLA_NAME for _ in gemm.roles)
    if choice is not None:
        backend, makers = (
            choice.gemm_backend(gemm).name,
            tuple(choice.operand_passes(role, ahead=ahead) for role in gemm.roles),
        )
    elif scaled:
        backend, makers = "native", tuple("native" for _ in gemm.roles)
    elif sides is not None:
        backend = "fused" if expert_tiles.has_grouped_gemm_kernel(*sides, device=problem.device) else "reference"
        made = [
            expert_tiles.has_quantize_kernel(role, getattr(problem.recipe, role), sides, problem.device)
            for role in gemm.roles
        ]
        makers = tuple("fused" if own else XLA_NAME for own in made)
    carriers = sides is not None and not scaled  # tiles of experts, whatever the format
    runs_in = BF16_UNIT if carriers else _multiplier((policies[0], policies[1]), backend, problem.device)
    return GemmEntry(
        left=f"{policies[0]}{_extra_x_terms(gemm, problem.recipe)}",
        right=str(policies[1]),
        bits=max(policy.format.element.bits if policy.format.element else 16 for policy in policies),
        runs_in=runs_in,
        execution=_execution((policies[0], policies[1]), runs_in),
        multiplied_by=XLA_NAME if backend in XLA_BACKENDS else backend,
        made_by=makers,
    )


def _extra_x_terms(gemm: ops.GemmKind, recipe: Recipe) -> str:
    """What a recipe does with x that its operand's policy does not say."""
    return " and of what that leaves over" if recipe.remainder and gemm is ops.gemm_problem.FPROP else ""


def _multiplier(policies: tuple[OperandPolicy, OperandPolicy], backend: str, device: Device) -> str:
    """The unit that multiplies: the one both formats name, if the backend uses it and the device trains on it, else
    bf16. Formats with one scale a tensor go into their unit under every backend but the reference."""
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
