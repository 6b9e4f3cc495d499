"""The three GEMMs of a linear y = x W, their epilogue, and the problem that a backend is chosen for.

| GEMM  | equation    | left operand           | right operand          | contracts |
|-------|-------------|------------------------|------------------------|-----------|
| fprop | y  = x W    | x [tokens..., inputs]  | W [inputs, outputs]    | inputs    |
| dgrad | dx = dy W^T | dy [tokens..., outputs]| W [inputs, outputs]    | outputs   |
| wgrad | dw = x^T dy | x [tokens..., inputs]  | dy [tokens..., outputs]| tokens    |

A backend is chosen from a `LinearProblem` before anything is traced.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from halfbyte.devices import Device, lookup, pallas_lowering_device
from halfbyte.devices.compile_target import TraceFlag, explained_compile_errors
from halfbyte.ops.linear_sharding import DimAxes, axes_in, reduce_scatter_dims
from halfbyte.ops.operand import DeferredAlpha, Operand, round_f32_to
from halfbyte.recipes import GEMM_ROLES, Recipe

ContractingAxes = tuple[tuple[int, ...], tuple[int, ...]]


_target = TraceFlag(None)


@dataclasses.dataclass(frozen=True)
class GemmKind:
    """One of the three GEMMs: its name and the dim that it contracts."""

    name: str
    contracts: str

    @property
    def roles(self) -> tuple[str, str]:
        """The recipe's names of the left and the right operand."""
        return GEMM_ROLES[self.name]

    def contracting_axes(self, left_ndim: int) -> ContractingAxes:
        """Returns the contracted axes of both operands, for a left operand with `left_ndim` dims."""
        last, tokens = (left_ndim - 1,), tuple(range(left_ndim - 1))
        return {"inputs": (last, (0,)), "outputs": (last, (1,)), "tokens": (tokens, tokens)}[self.contracts]

    def __str__(self) -> str:
        return self.name


FPROP, DGRAD, WGRAD = GemmKind("fprop", "inputs"), GemmKind("dgrad", "outputs"), GemmKind("wgrad", "tokens")


GEMMS = (FPROP, DGRAD, WGRAD)


@dataclasses.dataclass(frozen=True)
class LinearProblem:
    """y = x W with x [tokens, inputs], W [inputs, outputs], as one device multiplies them.

    With `training` it has all three GEMMs, otherwise only fprop. `weight_shards` counts the shards of the stored
    weight's inputs and outputs, which are all-gathered before a GEMM.
    """

    recipe: Recipe
    tokens: int
    inputs: int
    outputs: int
    device: Device
    training: bool = True
    dtype: str = "bfloat16"  # of the activations
    weight_dtype: str = "float32"  # of the master weight
    partitioned_by_xla: bool = False  # XLA partitions the program over several devices
    weight_shards: tuple[int, int] = (1, 1)

    @property
    def gathered(self) -> bool:
        """Returns True if the weight is all-gathered before a GEMM reads it."""
        return self.weight_shards != (1, 1)

    @property
    def weight_shard_shape(self) -> tuple[int, int]:
        """Returns the shape of one device's shard of the stored weight."""
        return self.inputs // self.weight_shards[0], self.outputs // self.weight_shards[1]

    @property
    def gemms(self) -> tuple[GemmKind, ...]:
        """Returns all three GEMMs, or only fprop without `training`."""
        return GEMMS if self.training else (FPROP,)

    @property
    def quantized_gemms(self) -> tuple[GemmKind, ...]:
        """Returns the GEMMs with a quantized operand."""
        formats = {gemm: [getattr(self.recipe, role).format for role in gemm.roles] for gemm in self.gemms}
        return tuple(gemm for gemm in self.gemms if any(fmt.quantized for fmt in formats[gemm]))

    def k_size(self, gemm: GemmKind) -> int:
        """Returns k: how many products `gemm` sums."""
        return int(getattr(self, gemm.contracts))

    @property
    def transpose_wgrad(self) -> bool:
        """Returns True if wgrad computes dw^T = dy^T x: if only the outputs of the weight are sharded.

        A reduce-scatter then shards the leading dim. Along another dim XLA would transpose the whole result first.
        """
        return self.weight_shards[0] == 1 < self.weight_shards[1]

    def gemm_sizes_mnk(self, gemm: GemmKind) -> tuple[int, int, int]:
        """Returns (m, n, k): rows and columns of the result, and the contracted size."""
        weight = (self.outputs, self.inputs) if self.transpose_wgrad else (self.inputs, self.outputs)
        rows_and_columns = {"fprop": (self.tokens, self.outputs), "dgrad": (self.tokens, self.inputs)}
        return *rows_and_columns.get(gemm.name, weight), self.k_size(gemm)

    def no_pallas_reason(self) -> str | None:
        """Returns why Pallas kernels cannot serve this problem under any recipe, or None."""
        if self.device.capability is None:
            return f"its kernels are for NVIDIA GPUs, this is {self.device.name}"
        if self.partitioned_by_xla:
            return "its kernels read a whole array on one device, and this program is sharded"
        return None if self.dtype == "bfloat16" else f"its kernels read bfloat16 activations, got {self.dtype}"

    def empty_reason(self) -> str | None:
        """Returns why there is nothing to quantize, or None."""
        if 0 not in (self.tokens, self.inputs, self.outputs) or not self.recipe.quantized:
            return None
        sizes = f"x [{self.tokens}, {self.inputs}], W [{self.inputs}, {self.outputs}]"
        return f"{sizes} has nothing to quantize: leave the empty batch out, or give it the bf16 recipe"

    def block_mismatch_reason(self) -> str | None:
        """Returns why the recipe's block sizes do not divide this problem, or None. Zero tokens are divisible."""
        for gemm in self.gemms:
            for role in gemm.roles:
                policy, size = getattr(self.recipe, role), self.k_size(gemm)
                group = policy.quantization_group_size
                if size % group:
                    return (
                        f"{gemm} sums over {size} {gemm.contracts}, and {role} ({policy}) needs a multiple of {group}; "
                        f"pad the {gemm.contracts}, or give this linear the bf16 recipe in the layer policy"
                    )
        return None


@contextlib.contextmanager
def compile_for(device: Device) -> Iterator[None]:
    """Chooses backends and lowers kernels for `device`, for programs that are compiled here and run elsewhere.

    Raises RuntimeError if JAX cannot compile for a second GPU architecture in this process.
    """
    with _target(device), pallas_lowering_device(device), explained_compile_errors():
        yield


def target_device() -> Device:
    """Returns the device that programs traced now will run on."""
    chosen: Device | None = _target.value
    return chosen or lookup(jax.devices()[0])


def dot_f32(a: jax.Array, b: jax.Array, axes: ContractingAxes, *, precision: lax.Precision | None = None) -> jax.Array:
    """Returns float32 sums of products over `axes`."""
    return lax.dot_general(a, b, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def to_k_major(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns x as a matrix [rows, k]."""
    free = [i for i in range(x.ndim) if i not in axes]
    return x.transpose(*free, *axes).reshape(math.prod(x.shape[i] for i in free), -1)


def result_shape(left: tuple[int, ...], right: tuple[int, ...], axes: ContractingAxes) -> tuple[int, ...]:
    """Returns the free dims of both shapes."""
    return tuple(
        n for shape, summed in zip((left, right), axes, strict=True) for i, n in enumerate(shape) if i not in summed
    )


def gemm_alpha(left: Operand, right: Operand) -> jax.Array | None:
    """Returns alpha of a GEMM's float32 sums: the product of both decode scales, None for 1.

    It has a value per row and column of the result if the operands have decode scales per row.
    """
    a, b = left.decode_scale, right.decode_scale
    if a is not None and a.ndim:
        a = a[..., None]  # [rows of left] -> [rows of left, 1]
        b = b if b is None or not b.ndim else jnp.expand_dims(b, range(a.ndim - 1))  # -> [1..., rows of right]
    scales = [scale for scale in (a, b) if scale is not None]
    return functools.reduce(jnp.multiply, scales) if scales else None


def apply_epilogue(sums: jax.Array, factor: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """Returns float32 sums times alpha, rounded once to `dtype`. XLA may not remove the rounding (`round_f32_to`)."""
    if factor is not None and 0 < factor.ndim < sums.ndim:
        factor = jnp.expand_dims(factor, range(sums.ndim - factor.ndim))  # per column only
    return round_f32_to(sums if factor is None else sums * factor, dtype)


def reduce_partial_sums(
    sums: jax.Array,
    over: tuple[str, ...],
    cut: DimAxes,
    dtype: jnp.dtype,
    *,
    overlap_with: Sequence[jax.Array | DeferredAlpha] = (),
) -> jax.Array:
    """Sums a GEMM's float32 results, partial over the mesh axes `over`, reduce-scatters them over `cut`, rounds once.

    The result depends on the arrays `overlap_with`. Otherwise XLA schedules them last, as no consumer waits for them,
    and the collective has no computation to overlap with.
    """
    scattered = reduce_scatter_dims(sums, (*cut, ()))
    remaining_axes = tuple(axis for axis in over if axis not in axes_in(cut))
    total = lax.psum(scattered, remaining_axes) if remaining_axes else scattered
    return apply_epilogue(
        lax.optimization_barrier((total, tuple(overlap_with)))[0] if overlap_with else total, None, dtype
    )


def check_input_dtype(x: jax.Array, asked: str) -> None:
    """Raises TypeError for an x of an unsupported dtype; `asked` is the function that was called."""
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise TypeError(f"{asked} takes bfloat16 or float32, got x of {x.dtype}; convert with astype first")


def check_weight_dtype(w: Any, asked: str, name: str = "w") -> None:
    """Raises TypeError for a weight without a gradient; `asked` is the function, `name` its argument."""
    if not jnp.issubdtype(w.dtype, jnp.floating):
        raise TypeError(
            f"{asked} takes weights in floating point, float32 as a rule, got {name} of {w.dtype}; convert with astype "
            "first, and codes by their scales"
        )
