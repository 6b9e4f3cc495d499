"""RMSNorm, y = x / rms(x) * scale.

Computed in float32, returned in the dtype of x. The VJP is explicit so that the residuals are x in its own dtype (bf16)
and one float32 per row, never a float32 copy of x. That float32, r, has a checkpoint name: if it is saved, y is
rematerialized by two products, bit for bit:

    r  = rsqrt(mean(x^2) + eps),  n = x r
    dx = r (g s - n mean(g s n)),  ds = sum over rows of g n

`rms_norm_fanout` is the norm between the residual stream and its consumers, as a block calls it. The Pallas kernels
(`kernels/rms_norm.py`) read and write each row once, with the gradients of all consumers and of the stream in the same
pass; XLA takes two passes forward and two to four backward. Kernels sum squares in another order than XLA, the
same on every GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from halfbyte.devices import Device
from halfbyte.distributed import DEFAULT_RULES, LogicalAxisRules, axis_size, shard_map_over
from halfbyte.kernels import rms_norm as kernels
from halfbyte.kernels.mosaic_launch import StackSlice, materialize_slice
from halfbyte.ops.gemm_problem import target_device
from halfbyte.ops.operand import SCALES_NAME, round_to_dtype
from halfbyte.ops.trace_context import is_multi_device_program

STREAM_AXES = ("batch", "residual_seq", "width")  # the logical axes of x
LOOP_REFUSAL = "layers in a loop keep x in stacks of XLA's, which its fusions read in place and a kernel does not"


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, scale: jax.Array, eps: float = 1e-5) -> jax.Array:
    """Divides `x` [..., D] by its RMS along the last dim, times `scale` [D]; in float32, rounded once to x's dtype."""
    return _scaled(x, _inverse(x, eps), scale)


def _inverse(x: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    return lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


def _scaled(x: jax.Array, inverse: jax.Array, scale: jax.Array) -> jax.Array:
    return round_to_dtype((x.astype(jnp.float32) * inverse * _row(scale, x.ndim)).astype(x.dtype))


def _fwd(x: jax.Array, scale: jax.Array, eps: float) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    inverse = checkpoint_name(_inverse(x, eps), SCALES_NAME)
    return _scaled(x, inverse, scale), (x, scale, inverse)


def _bwd(eps: float, residuals: tuple[jax.Array, jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, scale, inverse = residuals
    dy = g.astype(jnp.float32)
    normed = x.astype(jnp.float32) * inverse
    scaled = dy * _row(scale, x.ndim)
    dx = inverse * (scaled - normed * jnp.mean(scaled * normed, axis=-1, keepdims=True))
    dscale = jnp.sum(dy * normed, axis=tuple(range(x.ndim - 1)))
    return round_to_dtype(dx.astype(x.dtype)), dscale.astype(scale.dtype)


def _row(scale: jax.Array, ndim: int) -> jax.Array:
    return scale.astype(jnp.float32).reshape((1,) * (ndim - 1) + scale.shape)


rms_norm.defvjp(_fwd, _bwd)


@dataclasses.dataclass(frozen=True)
class NormFanout:
    """Static configuration of `rms_norm_fanout`: eps, number of consumers of h, mesh and sharding rules."""

    eps: float
    num_consumers: int = 1
    mesh: Mesh | None = None
    rules: LogicalAxisRules = DEFAULT_RULES

    def on_shards(self, kernel: Callable[..., Any], arrays: Sequence[Any], specs: Any, out_specs: Any) -> Any:
        """Returns kernel(*arrays) on each device's shards."""
        if self.mesh is None or self.mesh.size == 1:
            return kernel(*arrays)
        return shard_map_over(kernel, self.mesh, specs, out_specs)(*arrays)

    @property
    def specs(self) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
        """Returns the specs of x, of one value per row, and of partial sums [programs, width] over rows."""
        if self.mesh is None:
            return (PartitionSpec(),) * 3
        batch, seq, _ = (self.rules.mesh_axes(name) for name in STREAM_AXES)
        return (
            self.rules.spec(STREAM_AXES, self.mesh),
            self.rules.spec(STREAM_AXES[:2], self.mesh),
            PartitionSpec(tuple(axis for axis in (*batch, *seq) if axis in self.mesh.shape)),
        )


def norm_kernel_refusal(
    shape: tuple[int, ...], dtype: DTypeLike, *, looped: bool, device: Device | None = None, mesh: Mesh | None = None,
    rules: LogicalAxisRules = DEFAULT_RULES,
) -> str | None:  # fmt: skip
    """Returns why XLA computes the norm of x instead of a kernel, or None."""
    device = device or target_device()
    shards = [axis_size(mesh, rules.mesh_axes(name)) for name in STREAM_AXES[: len(shape) - 1]]
    if device.capability is None:
        return f"its kernels are for NVIDIA GPUs, this is {device.name}"
    if looped:
        return LOOP_REFUSAL
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"its kernels read bfloat16, got {jnp.dtype(dtype).name}"
    if len(shape) != 3 or any(n % size for n, size in zip(shape[:-1], shards, strict=True)):
        return f"the mesh does not cut {shape} evenly"
    if mesh is None and is_multi_device_program():
        return "its kernels read a whole array on one device, and this program is sharded"
    return kernels.unsupported_norm(math.prod(shape[:-1]) // math.prod(shards), shape[-1], capability=device.capability)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rms_norm_fanout(
    fork: NormFanout, x: jax.Array, scale: jax.Array, place: StackSlice | None = None
) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array | None]:
    """Returns (x [batch, seq, width], `rms_norm` of it once per consumer, the stack of `place` with x written into it).

    Kernels add the gradients of all consumers and of x in one pass. With a `place` the backward pass reads x from the
    cotangent of the stack, which must be the stack, as `mosaic_launch.return_as_cotangent` returns it. Without one x is
    a residual.
    """
    return _forked_fwd(fork, x, scale, place)[0]


def _forked_fwd(fork, x, scale, place):
    stream, row, _ = fork.specs

    def local(x, scale):
        h, inverse = kernels.rms_norm_forward(_matrix(x), scale.astype(jnp.float32), eps=fork.eps)
        return h.reshape(x.shape), inverse.reshape(x.shape[:-1])

    saved, stack = _store_residual(x, place)
    source, source_specs = _load_residual(saved, stack, stream)
    h, inverse = fork.on_shards(local, (source, scale), (source_specs, PartitionSpec()), (stream, row))
    inverse = checkpoint_name(inverse, SCALES_NAME)
    # x is already in memory for the kernel. Without the barrier XLA would compute its sum again for the next consumer.
    carried = lax.optimization_barrier(x) if stack is None else materialize_slice(source)
    return (carried, (h,) * fork.num_consumers, stack), (saved, scale, inverse)


def _store_residual(x: jax.Array, place: StackSlice | None) -> tuple[jax.Array, jax.Array | None]:
    """Returns (the residual: x, or the index of its slice; the stack with x written, or None)."""
    return (x, None) if place is None else (place.index, place.write_to_stack(x))


def _load_residual(kept: jax.Array, stack: jax.Array | None, stream: PartitionSpec) -> tuple[Any, Any]:
    """Returns (x as kernels read it, its specs): the residual x, or its slice of the stack."""
    if stack is None:
        return kept, stream
    # The pytree of a StackSlice with a spec per array; its field types do not allow that.
    return StackSlice(stack, kept), StackSlice(PartitionSpec(None, *stream), PartitionSpec())  # type: ignore[arg-type]


def _forked_bwd(fork, residuals, gradients):
    (saved, scale, inverse), (carry, each, stack) = residuals, gradients
    stream, row, rows = fork.specs
    x, x_specs = _load_residual(saved, stack, stream)

    def local(x, inverse, scale, carry, each):
        flat_grads = tuple(map(_matrix, each))
        dx, dscale = kernels.rms_norm_backward(_matrix(x), inverse.reshape(-1), scale, _matrix(carry), flat_grads)
        return dx.reshape(x.shape), dscale

    arrays = (x, inverse, scale.astype(jnp.float32), carry, each)
    specs = (x_specs, row, PartitionSpec(), stream, (stream,) * len(each))
    dx, dscale = fork.on_shards(local, arrays, specs, (stream, rows))
    # The cotangent of a slice: its index, an integer, has none.
    place = None if stack is None else StackSlice(stack, None)  # type: ignore[arg-type]
    return dx, jnp.sum(dscale, axis=0).astype(scale.dtype), place


def _matrix(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])  # [..., width] -> [rows, width], of an array or a StackSlice


rms_norm_fanout.defvjp(_forked_fwd, _forked_bwd)
