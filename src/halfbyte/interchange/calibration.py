"""The largest magnitude of each linear's input, found on text: what static activation scales are made of (W4A4).

The model runs under its own recipe, one batch at a time. What a linear reads is not one of its outputs, so the pass is
written here from the model's own blocks: the norms' outputs for q, k, v, gate and up, what attention returns for o, and
the gated activation for down.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfbyte.data.files import find_files
from halfbyte.evaluation import examples, open_task
from halfbyte.formats import amax_of
from halfbyte.interchange.hf_names import sites
from halfbyte.interchange.layouts import weight_policy
from halfbyte.interchange.source import Source
from halfbyte.models import Context, LlamaConfig, Params, param_specs
from halfbyte.models.context import LayerContext, key_of_layer, segments
from halfbyte.models.embedding import embed_tokens
from halfbyte.models.linear import BETWEEN, inside, linears
from halfbyte.models.llama import attention_block, layer_numbers, layer_slice, mlp_block, positions_of, rope_of
from halfbyte.nn.attention import attention
from halfbyte.nn.norm import rms_norm
from halfbyte.ops.activation import ACTIVATIONS
from halfbyte.recipe import Resolved

ROWS = 8
READS = {"q": "attention", "k": "attention", "v": "attention", "o": "o", "gate": "mlp", "up": "mlp", "down": "down"}
"""Linear -> which of a layer's four inputs it reads."""


def calibrate(source: Source, text: Path, resolved: Resolved, *, batches: int) -> dict[str, float]:
    """Module -> largest magnitude of its input over `batches` batches of the text, for every quantized linear."""
    config = source.model.config
    rows = token_rows(source, text, batches * ROWS)
    run = jax.jit(input_amaxes, static_argnums=(0, 3))
    found: dict[str, np.ndarray] = {}
    for start in range(0, len(rows), ROWS):
        ctx = Context(policy=resolved)
        made = run(config, source.model.params, jnp.asarray(rows[start : start + ROWS]), ctx)
        found = {name: np.maximum(np.asarray(value), found.get(name, 0.0)) for name, value in made.items()}
    quantized = [site for site in sites(config) if weight_policy(resolved, site) is not None]
    by_site = {site.module: found[READS[site.path.rsplit("/", 1)[-1]]][site.layer] for site in quantized}
    return {module: float(amax) for module, amax in by_site.items()}


def token_rows(source: Source, text: Path, count: int) -> np.ndarray:
    """int32 [count, seq]: the beginning of the text in rows of the model's length, documents begun by bos."""
    if source.model.tokenizer is None:
        raise ValueError("--calibrate needs a tokenizer, and this model has none")
    wanted, ids = count * source.seq, list[int]()
    for file in find_files([str(text)]):
        for example in examples(open_task(file)):
            ids += source.model.tokenizer.encode("".join(example.texts[0]), bos=True)
            if len(ids) >= wanted:
                break
    rows = min(count, len(ids) // source.seq)
    if rows == 0:
        raise ValueError(f"--calibrate {text}: {len(ids)} tokens are less than one row of {source.seq}; give more text")
    return np.asarray(ids[: rows * source.seq], np.int32).reshape(rows, source.seq)


def input_amaxes(cfg: LlamaConfig, params: Params, tokens: jax.Array, ctx: Context) -> dict[str, jax.Array]:
    """float32 [layers] for each of a layer's inputs: `attention` (q, k, v), `o`, `mlp` (gate, up) and `down`."""
    tables, specs = rope_of(cfg, positions_of({"tokens": tokens})), param_specs(cfg)
    x = embed_tokens(params["embed"], tokens, ctx)
    found = []
    for segment in segments(cfg, ctx):

        def body(x: jax.Array, layer: Any, recipes: Any = segment.recipes) -> Any:
            weights, number = layer
            return observed_block(cfg, weights, x, tables, LayerContext(ctx, specs, recipes, key_of_layer(ctx, number)))

        x, amaxes = lax.scan(body, x, (layer_slice(params, cfg, segment), layer_numbers(segment)))
        found.append(amaxes)
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)


def observed_block(
    cfg: LlamaConfig, weights: Params, x: jax.Array, tables: Any, here: LayerContext
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(the block's output, the largest magnitudes of what its linears read)."""
    seen: dict[str, jax.Array] = {}

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = attention(q, k, v, None, implementation=here.ctx.attention)
        seen["o"] = amax_of(out)
        return out

    seen["attention"] = amax_of(rms_norm(x, weights["attention"]["norm"], cfg.norm_eps))
    x = x + attention_block(cfg, weights["attention"], x, tables, here, attend)
    h = rms_norm(x, weights["mlp"]["norm"], cfg.norm_eps)
    both = {"gate": inside("mlp"), "up": inside("mlp")}
    gate, up = linears(h, weights["mlp"], here, "mlp", both, x_axes=BETWEEN)
    seen |= {"mlp": amax_of(h), "down": amax_of(ACTIVATIONS[cfg.activation].forward(gate, up))}
    return x + mlp_block(cfg, weights["mlp"], x, here)[0], seen
