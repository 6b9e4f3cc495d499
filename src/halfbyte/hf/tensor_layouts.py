"""Tensors of a model in Hugging Face `transformers`, and their layout in each export format.

    hf                  module.weight                in one float dtype
    compressed-tensors  module.weight_packed         uint8 [N, K/2], two codes a byte, the even K in the low nibble
                        module.weight_scale          float8_e4m3fn [N, K/16]
                        module.weight_global_scale   float32 [1] = S, by which block scales are divided
    modelopt            module.weight, .weight_scale as above, and weight_scale_2 float32 = 1/S, a factor

W4A4 adds the scale of the linear's input: `input_global_scale` [1], or `input_scale`. Linears that the policy leaves in
bf16 are exported as under `hf`, without any scale; a quantized linear has all of them, because an engine that misses
one reads uninitialized memory.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np

from halfbyte.formats import NVFP4, quantize
from halfbyte.hf.hf_folder import TensorToWrite
from halfbyte.models import (
    GEMM_KINDS,
    LlamaConfig,
    Params,
    flat_param_specs,
    flatten_specs,
    group_amaxes,
    matrix_amaxes,
)
from halfbyte.recipes import OperandPolicy, ResolvedPolicy

TRANSPOSED_KINDS = ("linear", "experts", "router", "head")


E4M3_DTYPE = np.dtype(ml_dtypes.float8_e4m3fn)
F32, U8 = np.dtype(np.float32), np.dtype(np.uint8)
# Shape of a tensor scale. By a 0-dim scale, torch would divide bfloat16 block scales in bfloat16.
SCALAR_SHAPE = (1,)
K_AXIS = -2  # the contraction axis of a weight [inputs, outputs] in fprop
InputAmaxes = Mapping[str, float]
"""Amax of a linear's input, by module."""


@dataclass(frozen=True)
class HfTensor:
    """A tensor of the Hugging Face model, and its position in ours: parameter `path`, `layer` and `expert`.

    Theirs has one tensor per layer (and expert) with weights [out, in]; ours are stacked and [in, out]. Rotary halves
    have the same order (pairs i and i + head_dim/2), so nothing is permuted.
    """

    module: str
    path: str
    layer: int | None
    shape: tuple[int, ...]
    kind: str
    expert: int | None = None

    @property
    def stack_index(self) -> tuple[int, ...]:
        """Returns the index in the stacked parameter: layer and expert."""
        return tuple(number for number in (self.layer, self.expert) if number is not None)

    @property
    def name(self) -> str:
        return f"{self.module}.weight"

    @property
    def transposed(self) -> bool:
        """Returns True if the tensor is [out, in]."""
        return self.kind in TRANSPOSED_KINDS


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that are built together and stored in one file."""

    planned: tuple[TensorToWrite, ...]
    build: Callable[[], tuple[np.ndarray, ...]]

    @property
    def nbytes(self) -> int:
        return sum(plan.nbytes for plan in self.planned)


@dataclass(frozen=True)
class StoredCodes:
    """A weight as fprop multiplies it: element(code) * scale / encode_scale, laid out [outputs, inputs]."""

    packed: np.ndarray  # uint8 [N, K/2]
    scales: np.ndarray  # float8_e4m3fn [N, K/16]
    encode_scale: np.ndarray  # float32 scalar, S
    decode_scale: np.ndarray  # float32 scalar, 1/S


@dataclass(frozen=True)
class Nvfp4Layout:
    """Names of the tensors of a quantized linear in one format, and which tensor scale it stores."""

    weight: str
    global_scale: str
    input_scale: str
    stores_encode_scale: bool  # S, by which block scales are divided; else 1/S, a factor

    def plan(self, site: HfTensor, *, activations: bool) -> tuple[TensorToWrite, ...]:
        n, k = site.shape
        named = (
            (self.weight, U8, (n, k // 2)),
            ("weight_scale", E4M3_DTYPE, (n, k // 16)),
            (self.global_scale, F32, SCALAR_SHAPE),
        )
        inputs = ((self.input_scale, F32, SCALAR_SHAPE),) if activations else ()
        return tuple(TensorToWrite(f"{site.module}.{name}", dtype, shape) for name, dtype, shape in (*named, *inputs))

    def tensors(self, codes: StoredCodes, input_amax: float | None) -> tuple[np.ndarray, ...]:
        scale = codes.encode_scale if self.stores_encode_scale else codes.decode_scale
        arrays = [codes.packed, codes.scales, np.full(SCALAR_SHAPE, scale, F32)]
        if input_amax is not None:
            input_scales = NVFP4.tensor_scales(jax.numpy.float32(input_amax))
            input_scale = input_scales.encode if self.stores_encode_scale else input_scales.decode
            arrays.append(np.full(SCALAR_SHAPE, input_scale, F32))
        return tuple(arrays)


COMPRESSED_TENSORS = Nvfp4Layout("weight_packed", "weight_global_scale", "input_global_scale", True)
MODELOPT = Nvfp4Layout("weight", "weight_scale_2", "input_scale", False)


def hf_tensors(cfg: LlamaConfig) -> list[HfTensor]:
    """Returns every tensor of a model in the order of its specs, layer by layer. A tied head has none."""
    specs = flat_param_specs(cfg)
    first = next(index for index, spec in enumerate(specs.values()) if spec.stacked)
    tensors = []
    for index, (path, spec) in enumerate(specs.items()):
        shape = spec.shape[spec.stacked + bool(spec.experts) :]
        shape = shape[::-1] if spec.kind in TRANSPOSED_KINDS else shape
        for layer in range(cfg.layers) if spec.stacked else (None,):
            module = spec.module if layer is None else f"model.layers.{layer}.{spec.module}"
            order = (index, 0) if layer is None else (first, layer)
            for expert in range(spec.experts) if spec.experts else (None,):
                named = module if expert is None else module.replace("*", str(expert))
                tensors.append((order, HfTensor(named, path, layer, shape, spec.kind, expert)))
    return [tensor for _, tensor in sorted(tensors, key=lambda entry: entry[0])]


def unquantized_groups(cfg: LlamaConfig, params: Params, dtype: np.dtype) -> Iterator[TensorGroup]:
    """Yields every tensor in one float dtype."""
    flat = flatten_specs(params)
    for site in hf_tensors(cfg):
        yield _unquantized_group(site, flat[site.path], dtype)


def nvfp4_groups(
    cfg: LlamaConfig, params: Params, resolved: ResolvedPolicy, layout: Nvfp4Layout, *, dtype: np.dtype,
    input_amax: InputAmaxes | None = None,
) -> Iterator[TensorGroup]:  # fmt: skip
    """Yields NVFP4 codes of the weights that the policy quantizes, and the other tensors in `dtype`."""
    flat, scale_amax = flatten_specs(params), weight_amaxes(cfg, params, resolved)
    for site in hf_tensors(cfg):
        policy = weight_policy(resolved, site)
        if policy is None:
            yield _unquantized_group(site, flat[site.path], dtype)
            continue
        amax = None if input_amax is None else input_amax[site.module]
        plan = layout.plan(site, activations=amax is not None)
        make = functools.partial(_quantized, layout, flat[site.path], scale_amax[site.path], site, policy, amax)
        yield TensorGroup(plan, make)


def weight_policy(resolved: ResolvedPolicy, site: HfTensor) -> OperandPolicy | None:
    """Returns the fprop policy of this weight, None if it is not quantized; ValueError if no format can store it."""
    if site.kind not in ("linear", "experts") or site.layer is None:
        return None
    recipe = resolved.recipe_at(site.path, site.layer)
    policy: OperandPolicy = recipe.fprop_w
    if not policy.format.quantized:
        return None
    if policy.format != NVFP4 or policy.hadamard or policy.stochastic:
        raise ValueError(
            f"recipe {recipe.name} multiplies {site.path} in a way that no NVFP4 checkpoint can hold ({policy}); "
            "export --format hf, or name another recipe (--recipe nvfp4)"
        )
    return policy


def weight_amaxes(cfg: LlamaConfig, params: Params, resolved: ResolvedPolicy) -> dict[str, jax.Array]:
    """Returns the amax of each linear's tensor scale by path, float32 [layers] or [layers, experts].

    Its own amax, or that of its group if the recipe shares tensor scales.
    """
    amaxes, flat = {}, flatten_specs(params)
    for path in (path for path, spec in flat_param_specs(cfg).items() if spec.kind in GEMM_KINDS):
        shared = group_amaxes(params["layers"], resolved, *path.split("/")[1:])
        amaxes[path] = jax.jit(matrix_amaxes)(flat[path]) if shared is None else shared
    return amaxes


def quantize_for_storage(weight: jax.Array, policy: OperandPolicy, amax: jax.Array | None = None) -> StoredCodes:
    """Returns the codes of `weight` [inputs, outputs] under the fprop `policy`, as a checkpoint stores them.

    `amax` is that of the weight's group if the recipe shares tensor scales. The scale of a 2D block, for 16 rows, is
    repeated for each row: the same values as 1D blocks.
    """
    tensor = _quantize(weight, policy, amax)
    # [inputs/16, outputs or outputs/16] -> [outputs, inputs/16]
    scales = np.asarray(tensor.scales).T
    scales = np.repeat(scales, weight.shape[1] // scales.shape[0], axis=0)
    return StoredCodes(
        packed=np.ascontiguousarray(np.asarray(tensor.packed).T),
        scales=np.ascontiguousarray(scales),
        encode_scale=np.asarray(tensor.encode_scale),
        decode_scale=np.asarray(tensor.decode_scale),
    )


@functools.partial(jax.jit, static_argnums=1)
def _quantize(weight: jax.Array, policy: OperandPolicy, amax: jax.Array | None) -> Any:
    return quantize(weight, policy.format, block=policy.block, axis=K_AXIS, amax=amax)


def _quantized(
    layout: Nvfp4Layout,
    stack: jax.Array,
    amaxes: jax.Array,
    site: HfTensor,
    policy: OperandPolicy,
    input_amax: float | None,
) -> tuple[np.ndarray, ...]:
    assert site.layer is not None
    weight, amax = stack[site.stack_index], amaxes[site.stack_index]
    if not bool(np.isfinite(amax)):
        raise ValueError(f"{site.module} holds numbers that are not finite; a run that diverged cannot be exported")
    return layout.tensors(quantize_for_storage(weight, policy, amax), input_amax)


def _unquantized_group(site: HfTensor, value: jax.Array, dtype: np.dtype) -> TensorGroup:
    def make() -> tuple[np.ndarray, ...]:
        array = np.asarray(value[site.stack_index])
        return (np.ascontiguousarray(array.T if site.transposed else array).astype(dtype),)

    return TensorGroup((TensorToWrite(site.name, dtype, site.shape),), make)
