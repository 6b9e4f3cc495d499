"""What a model's tensors look like in each format that is exported: names, dtypes, and how they are made.

    hf                  module.weight                in one float dtype
    compressed-tensors  module.weight_packed         uint8 [N, K/2], two codes a byte, the even K in the low nibble
                        module.weight_scale          float8_e4m3fn [N, K/16]
                        module.weight_global_scale   float32 [1] = S, which block scales are divided by
    modelopt            module.weight, .weight_scale as above, and weight_scale_2 float32 = 1/S, a factor

W4A4 adds the scale of the linear's input: `input_global_scale` [1], or `input_scale`. Linears that the policy leaves
in bf16 are exported as under `hf` and carry no scale at all; a quantized one carries all of them, because an engine
that misses one loads what happens to be in memory.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np

from halfbyte.formats import NVFP4, quantize
from halfbyte.interchange.hf_names import Site, sites
from halfbyte.interchange.tensor_file import Planned
from halfbyte.models import GEMMS, LlamaConfig, Params, amaxes_of, declared, flatten, group_amaxes
from halfbyte.recipe import OperandPolicy, Resolved

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
F32, U8 = np.dtype(np.float32), np.dtype(np.uint8)
ONE = (1,)  # the shape of a tensor scale: without a dim, torch would divide bfloat16 block scales by it in bfloat16
CONTRACTED = -2  # the axis of a weight [inputs, outputs] that fprop sums over
Amaxes = Mapping[str, float]
"""Largest magnitude of a linear's input, by module."""


@dataclass(frozen=True)
class Part:
    """Tensors that are made together and lie in one file."""

    planned: tuple[Planned, ...]
    make: Callable[[], tuple[np.ndarray, ...]]

    @property
    def nbytes(self) -> int:
        return sum(plan.nbytes for plan in self.planned)


@dataclass(frozen=True)
class Codes:
    """A weight as fprop multiplies it: element(code) * scale / encode_scale, laid out [outputs, inputs]."""

    packed: np.ndarray  # uint8 [N, K/2]
    scales: np.ndarray  # float8_e4m3fn [N, K/16]
    encode_scale: np.ndarray  # float32 scalar, S
    decode_scale: np.ndarray  # float32 scalar, 1/S


@dataclass(frozen=True)
class NvfpLayout:
    """How one convention names the tensors of a quantized linear, and what it stores of the tensor scale."""

    weight: str
    global_scale: str
    input_scale: str
    stores_encode: bool  # S, which is divided by; else 1/S, which multiplies

    def plan(self, site: Site, *, activations: bool) -> tuple[Planned, ...]:
        n, k = site.shape
        named = (
            (self.weight, U8, (n, k // 2)),
            ("weight_scale", E4M3, (n, k // 16)),
            (self.global_scale, F32, ONE),
        )
        inputs = ((self.input_scale, F32, ONE),) if activations else ()
        return tuple(Planned(f"{site.module}.{name}", dtype, shape) for name, dtype, shape in (*named, *inputs))

    def tensors(self, codes: Codes, input_amax: float | None) -> tuple[np.ndarray, ...]:
        scale = codes.encode_scale if self.stores_encode else codes.decode_scale
        made = [codes.packed, codes.scales, np.full(ONE, scale, F32)]
        if input_amax is not None:
            of_input = NVFP4.tensor_scales(jax.numpy.float32(input_amax))
            made.append(np.full(ONE, of_input.encode if self.stores_encode else of_input.decode, F32))
        return tuple(made)


COMPRESSED_TENSORS = NvfpLayout("weight_packed", "weight_global_scale", "input_global_scale", True)
MODELOPT = NvfpLayout("weight", "weight_scale_2", "input_scale", False)


def plain_parts(cfg: LlamaConfig, params: Params, dtype: np.dtype) -> Iterator[Part]:
    """Every tensor in one float dtype."""
    flat = flatten(params)
    for site in sites(cfg):
        yield _plain(site, flat[site.path], dtype)


def nvfp4_parts(
    cfg: LlamaConfig, params: Params, resolved: Resolved, layout: NvfpLayout, *, dtype: np.dtype,
    input_amax: Amaxes | None = None,
) -> Iterator[Part]:  # fmt: skip
    """NVFP4 codes where the policy quantizes a weight, the rest in `dtype`."""
    flat, scale_amax = flatten(params), weight_amaxes(cfg, params, resolved)
    for site in sites(cfg):
        policy = weight_policy(resolved, site)
        if policy is None:
            yield _plain(site, flat[site.path], dtype)
            continue
        amax = None if input_amax is None else input_amax[site.module]
        plan = layout.plan(site, activations=amax is not None)
        make = functools.partial(_quantized, layout, flat[site.path], scale_amax[site.path], site, policy, amax)
        yield Part(plan, make)


def weight_policy(resolved: Resolved, site: Site) -> OperandPolicy | None:
    """How fprop quantizes this weight, None if it does not. ValueError for what no serving format can hold."""
    if site.kind not in ("linear", "experts") or site.layer is None:
        return None
    recipe = resolved.at(site.path, site.layer)
    policy: OperandPolicy = recipe.fprop_w
    if not policy.format.quantized:
        return None
    if policy.format != NVFP4 or policy.hadamard or policy.stochastic:
        raise ValueError(
            f"recipe {recipe.name} multiplies {site.path} in a way that no NVFP4 checkpoint can hold ({policy}); "
            "export --format hf, or name another recipe (--recipe nvfp4)"
        )
    return policy


def stored_codes(weight: jax.Array, policy: OperandPolicy, amax: jax.Array | None = None) -> Codes:
    """The codes of `weight` [inputs, outputs] that fprop multiplies under `policy`, as a checkpoint stores them. `amax`
    is its group's where the recipe shares tensor scales.

    Square blocks have one scale for 16 rows, which is written 16 times: the same numbers in the one-row form.
    """
    tensor = _quantize(weight, policy, amax)
    # [inputs/16, outputs or outputs/16] -> [outputs, inputs/16]
    scales = np.asarray(tensor.scales).T
    scales = np.repeat(scales, weight.shape[1] // scales.shape[0], axis=0)
    return Codes(
        packed=np.ascontiguousarray(np.asarray(tensor.packed).T),
        scales=np.ascontiguousarray(scales),
        encode_scale=np.asarray(tensor.encode_scale),
        decode_scale=np.asarray(tensor.decode_scale),
    )


@functools.partial(jax.jit, static_argnums=1)
def _quantize(weight: jax.Array, policy: OperandPolicy, amax: jax.Array | None) -> Any:
    return quantize(weight, policy.format, block=policy.block, axis=CONTRACTED, amax=amax)


def _plain(site: Site, value: jax.Array, dtype: np.dtype) -> Part:
    def make() -> tuple[np.ndarray, ...]:
        array = np.asarray(value[site.at])
        return (np.ascontiguousarray(array.T if site.transposed else array).astype(dtype),)

    return Part((Planned(site.name, dtype, site.shape),), make)


def weight_amaxes(cfg: LlamaConfig, params: Params, resolved: Resolved) -> dict[str, jax.Array]:
    """float32 [layers], or [layers, experts], by path: what each linear's tensor scale is made of, its own amax or its
    group's."""
    found, flat = {}, flatten(params)
    for path in (path for path, spec in declared(cfg).items() if spec.kind in GEMMS):
        shared = group_amaxes(params["layers"], resolved, *path.split("/")[1:])
        found[path] = jax.jit(amaxes_of)(flat[path]) if shared is None else shared
    return found


def _quantized(
    layout: NvfpLayout, stack: jax.Array, amaxes: jax.Array, site: Site, policy: OperandPolicy, input_amax: float | None
) -> tuple[np.ndarray, ...]:
    assert site.layer is not None
    weight, amax = stack[site.at], amaxes[site.at]
    if not bool(np.isfinite(amax)):
        raise ValueError(f"{site.module} holds numbers that are not finite; a run that diverged cannot be exported")
    return layout.tensors(stored_codes(weight, policy, amax), input_amax)
