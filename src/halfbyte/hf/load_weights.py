"""The tensors of a folder as parameters on their devices, one layer of one parameter at a time.

A parameter is laid out on the mesh first, empty; then each layer's tensor is read, only the part that a device holds
of it, in the file's own dtype, and written into its place by a program that gives the parameter its own memory back
(donation). What exists beside the parameters is one tensor: never a second copy of the model, on no mesh.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from halfbyte.checkpoint import MAX_PLAUSIBLE_VALUE
from halfbyte.distributed import DEFAULT_RULES, LogicalAxisRules, named_sharding
from halfbyte.formats import NVFP4, QTensor, unpack_nibbles
from halfbyte.hf.hf_config import detect_layout
from halfbyte.hf.hf_folder import HfFolder, TensorToWrite
from halfbyte.hf.tensor_layouts import HfTensor, Nvfp4Layout, hf_tensors
from halfbyte.io import escape_control_chars
from halfbyte.models import LlamaConfig, Params, flat_param_specs, unflatten_specs

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
TIED_HEAD = "lm_head.weight"
DERIVED_TENSOR_SUFFIX = (
    "rotary_emb.inv_freq"  # old checkpoints store the rotary frequencies, which follow from the config
)
ProgressFn = Callable[[int, int], None]
CHUNK = 1 << 24
"""Values of a tensor that are looked at together."""


def check_tensors(folder: HfFolder, cfg: LlamaConfig) -> list[HfTensor]:
    """The model's tensors, all there in the right shape and dtype; ValueError names the first that is not."""
    entries = folder.entries
    if cfg.layers > len(entries):
        raise ValueError(f"import: num_hidden_layers is {cfg.layers:,}, but the folder holds {len(entries):,} tensors")
    layout = detect_layout(folder.config)
    wanted, known = hf_tensors(cfg), set[str]()
    for site in wanted:
        for plan in _stored(folder, site, layout):
            _check_entry(folder, plan, cfg.name)
            known.add(plan.name)
        known |= {f"{site.module}.{layout.input_scale}"} if layout else set()
    _check_others(folder, cfg, known)
    return wanted


def _stored(folder: HfFolder, site: HfTensor, layout: Nvfp4Layout | None) -> tuple[TensorToWrite, ...]:
    """The tensors that hold this weight: codes and scales if it is quantized, else itself."""
    if is_quantized(folder, site, layout):
        assert layout is not None
        return layout.plan(site, activations=False)
    return (TensorToWrite(site.name, np.dtype(np.float32), site.shape),)


def is_quantized(folder: HfFolder, site: HfTensor, layout: Nvfp4Layout | None) -> bool:
    """Whether the folder holds this weight as NVFP4 codes."""
    if layout is None:
        return False
    entry = folder.entries.get(f"{site.module}.{layout.weight}")
    return entry is not None and entry.dtype == np.uint8


def _check_entry(folder: HfFolder, plan: TensorToWrite, model: str) -> None:
    entry = folder.entries.get(plan.name)
    if entry is None:
        raise ValueError(f"import: there is no tensor {plan.name!r}; is {folder.directory} a whole {model}?")
    scalar = plan.shape in ((), (1,)) and entry.shape in ((), (1,))
    if entry.shape != plan.shape and not scalar:
        raise ValueError(
            f"import: {plan.name} has shape {list(entry.shape)}, but its config.json asks for {list(plan.shape)}"
        )
    floats = plan.dtype == np.float32 and not scalar
    if entry.dtype != plan.dtype and not (floats and entry.dtype.name in FLOAT_DTYPES):
        wanted = ", ".join(FLOAT_DTYPES) if floats else plan.dtype.name
        raise ValueError(f"import: {plan.name} is {entry.dtype.name}; it is read as {wanted}")


def _check_others(folder: HfFolder, cfg: LlamaConfig, known: set[str]) -> None:
    """Tensors that the model has no place for are an error, but for what follows from the others."""
    others = [name for name in folder.entries if name not in known and not name.endswith(DERIVED_TENSOR_SUFFIX)]
    if cfg.tied and TIED_HEAD in others:
        others.remove(TIED_HEAD)
        embedding = next(site.name for site in hf_tensors(cfg) if site.path == "embed")
        if folder.read(TIED_HEAD).tobytes() != folder.read(embedding).tobytes():
            raise ValueError(
                f"import: tie_word_embeddings is true, but {TIED_HEAD} is not the embedding; which is right?"
            )
    if others:
        shown = ", ".join(map(escape_control_chars, sorted(others)[:3]))
        raise ValueError(f"import: {len(others)} tensors have no place in {cfg.name}: {shown[:300]}")


def check_all_finite_tensors(folder: HfFolder, watch: ProgressFn | None = None) -> None:
    """ValueError naming the first tensor that holds a value which no model can be computed with. `watch` gets (tensors
    done, of)."""
    for done, (name, entry) in enumerate(folder.entries.items()):
        if watch is not None:
            watch(done, len(folder.entries))
        rows = max(1, CHUNK // max(1, math.prod(entry.shape[1:])))
        starts = range(0, entry.shape[0], rows) if entry.shape else (0,)
        has_floats = jnp.issubdtype(entry.dtype, jnp.floating) and entry.stop > entry.start
        for start in starts if has_floats else ():
            part = folder.read(name, slice(start, start + rows)).astype(np.float32)
            if not (np.abs(part) < MAX_PLAUSIBLE_VALUE).all():
                raise _not_finite(folder, name)


def _not_finite(folder: HfFolder, name: str) -> ValueError:
    return ValueError(
        f"{folder.directory}: tensor {escape_control_chars(name)} holds values that are not finite, or too large "
        "to be squared; no model can be computed with them: get the weights again"
    )


def load_params(
    folder: HfFolder, cfg: LlamaConfig, *, mesh: Mesh | None = None, rules: LogicalAxisRules = DEFAULT_RULES
) -> Params:
    """The model's parameters, float32, on `mesh` by `rules` or on the first device."""
    todo, layout = check_tensors(folder, cfg), detect_layout(folder.config)
    specs, here = flat_param_specs(cfg), SingleDeviceSharding(jax.local_devices()[0])
    params: dict[str, jax.Array] = {}
    for site in sorted(todo, key=lambda site: site.path):
        spec = specs[site.path]
        where = here if mesh is None else named_sharding(spec.axes, mesh, rules)
        if site.path not in params:
            empty = functools.partial(jnp.zeros, spec.shape, jnp.float32)
            params[site.path] = jax.jit(empty, out_shardings=where)()
        part = _read(folder, site, layout, _tensor_sharding(where, site))
        if not _is_finite_and_bounded(part):
            raise _not_finite(folder, site.name)
        at = tuple(jnp.int32(number) for number in site.stack_index)
        params[site.path] = _write_layer(params[site.path], part, at, site.transposed)
        jax.block_until_ready(params[site.path])  # or the queue would hold several tensors at once
    return unflatten_specs({path: params[path] for path in specs})


def _tensor_sharding(where: Any, site: HfTensor) -> Any:
    """Of one tensor as the file has it: the parameter's, without layer and expert, turned if the tensor is."""
    if not isinstance(where, NamedSharding):
        return where
    axes = [*where.spec, *[None] * (len(site.shape) + len(site.stack_index) - len(where.spec))][len(site.stack_index) :]
    return NamedSharding(where.mesh, PartitionSpec(*(reversed(axes) if site.transposed else axes)))


def _read(folder: HfFolder, site: HfTensor, layout: Nvfp4Layout | None, where: Any) -> jax.Array:
    """One weight on its devices as the file has it, [out, in]; NVFP4 codes as the float32 numbers they stand for."""
    if not is_quantized(folder, site, layout):
        return _put_on_mesh(folder, site.name, where)
    assert layout is not None
    packed, scales = (_put_on_mesh(folder, f"{site.module}.{name}", where) for name in (layout.weight, "weight_scale"))
    stored = np.float32(folder.read(f"{site.module}.{layout.global_scale}").reshape(()))
    return _decode(packed, scales, jnp.asarray(np.float32(1) / stored if layout.stores_encode_scale else stored))


def _put_on_mesh(folder: HfFolder, name: str, where: Any) -> jax.Array:
    """One tensor in the file's dtype; each device's part is read by itself."""

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return folder.read(name, index[0])[(slice(None), *index[1:])]

    entry = folder.entries[name]
    return jax.make_array_from_callback(entry.shape, where, shard, dtype=entry.dtype)


@jax.jit
def _is_finite_and_bounded(part: jax.Array) -> jax.Array:
    return jnp.all(jnp.abs(part.astype(jnp.float32)) < MAX_PLAUSIBLE_VALUE)


@jax.jit
def _decode(packed: jax.Array, scales: jax.Array, decode_scale: jax.Array) -> jax.Array:
    """float32 [N, K] of codes uint8 [N, K/2] and scales [N, K/16]."""
    return QTensor(unpack_nibbles(packed), scales, jnp.float32(0), decode_scale, NVFP4).dequantize()


def storage_description(folder: HfFolder) -> str:
    """How the folder keeps its weights, for people: a dtype, or NVFP4 and whose layout."""
    if detect_layout(folder.config) is not None:
        return f"NVFP4 weights ({folder.config['quantization_config']['quant_method']})"
    return "/".join(sorted({entry.dtype.name for entry in folder.entries.values()})) + " weights"


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _write_layer(stack: jax.Array, part: jax.Array, at: tuple[jax.Array, ...], transposed: bool) -> jax.Array:
    """`stack` with `part` at these numbers of its first dims (none: as all of it), in float32, turned to [in, out]."""
    value = (part.T if transposed else part).astype(stack.dtype)
    start = (*at, *(jnp.int32(0) for _ in value.shape))
    return lax.dynamic_update_slice(stack, value.reshape((1,) * len(at) + value.shape), start) if at else value
