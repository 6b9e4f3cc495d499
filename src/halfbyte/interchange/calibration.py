"""The largest magnitude of each linear's input, found on text: what static activation scales are made of (W4A4).

The model runs under its own recipe, one batch at a time. What a linear reads is seen by a watch on the
model's own layers; what down reads inside of the MLP, which is one op, is made again.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from halfbyte.data.files import find_files
from halfbyte.evaluation import TEXT, examples, open_task
from halfbyte.formats import amax_of
from halfbyte.interchange.hf_names import sites
from halfbyte.interchange.layouts import weight_policy
from halfbyte.interchange.source import Source
from halfbyte.models import Context, LlamaConfig, Params, refuse_experts
from halfbyte.models.context import LayerContext
from halfbyte.models.linear import linears
from halfbyte.models.llama import begin, layer_of
from halfbyte.models.walk import through_layers
from halfbyte.ops.activation import ACTIVATIONS
from halfbyte.recipe import Resolved

ROWS = 8


def calibrate(source: Source, text: Path, resolved: Resolved, *, batches: int) -> dict[str, float]:
    """Module -> largest magnitude of its input over `batches` batches of the text, for every quantized linear."""
    config = source.model.config
    refuse_experts(config, "--calibrate")
    rows = token_rows(source, text, batches * ROWS)
    run = jax.jit(input_amaxes, static_argnums=(0, 3))
    found: dict[str, np.ndarray] = {}
    for start in range(0, len(rows), ROWS):
        ctx = Context(policy=resolved)
        made = run(config, source.model.params, jnp.asarray(rows[start : start + ROWS]), ctx)
        found = {name: np.maximum(np.asarray(value), found.get(name, 0.0)) for name, value in made.items()}
    quantized = [site for site in sites(config) if weight_policy(resolved, site) is not None]
    by_site = {site.module: found[site.path.removeprefix("layers/")][site.layer] for site in quantized}
    return {module: float(amax) for module, amax in by_site.items()}


def token_rows(source: Source, text: Path, count: int) -> np.ndarray:
    """int32 [count, seq]: the beginning of the text in rows of the model's length, documents begun by bos."""
    if source.model.tokenizer is None:
        raise ValueError("--calibrate needs a tokenizer, and this model has none")
    wanted, ids = count * source.seq, list[int]()
    for file in find_files([str(text)]):
        if (task := open_task(file)).kind != TEXT:
            raise ValueError(f"--calibrate {file.name}: it holds a task ({task.kind}); give text")
        for example in examples(task):
            ids += source.model.tokenizer.encode(example["text"], bos=True)
            if len(ids) >= wanted:
                break
    rows = min(count, len(ids) // source.seq)
    if rows == 0:
        raise ValueError(f"--calibrate {text}: {len(ids)} tokens are less than one row of {source.seq}; give more text")
    return np.asarray(ids[: rows * source.seq], np.int32).reshape(rows, source.seq)


def input_amaxes(cfg: LlamaConfig, params: Params, tokens: jax.Array, ctx: Context) -> dict[str, jax.Array]:
    """float32 [layers] by "group/name" of a linear: the largest magnitude of what it reads."""
    layer = layer_of(cfg, {"tokens": tokens}, ctx)

    def visit(x: jax.Array, weights: Params, here: LayerContext, _: None) -> Any:
        inputs = Inputs({})
        x = layer(x, weights, dataclasses.replace(here, watch=inputs))
        gate, up = linears(inputs.seen["mlp/gate"], weights["mlp"], here, "mlp", ("gate", "up"))
        inputs.seen["mlp/down"] = ACTIVATIONS[cfg.activation].forward(gate, up)
        return x, {site: amax_of(read) for site, read in inputs.seen.items()}

    _, found = through_layers(cfg, params, begin(cfg, params, tokens, ctx), ctx, visit)
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)


class Inputs(NamedTuple):
    """What each linear of a layer read, by site."""

    seen: dict[str, jax.Array]

    def into(self, site: str, x: jax.Array) -> jax.Array:
        self.seen[site] = x
        return x

    def out_of(self, site: str, y: jax.Array) -> jax.Array:
        return y
