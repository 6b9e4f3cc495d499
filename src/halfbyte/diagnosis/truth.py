"""Gradient truth: a quantized GEMM beside the same GEMM in bf16, on what the run really gave it.

For results q (quantized) and b (bf16) of one GEMM:

    gain    <q, b> / <b, b>       the slope of q against b: 1 for an unbiased quantizer, 0.88 for torchao's old blocks
    bias    mean(q - b) / rms(b)
    cosine  <q, b> / |q| |b|
    snr     10 log10(|b|^2 / |q - b|^2)

Rounding noise lowers cosine and SNR and leaves the gain alone, so it is the gain that tells a defect from noise.
"""

from typing import Any

import jax
import jax.numpy as jnp

from halfbyte.models.context import Context
from halfbyte.recipe import Recipe, RecipeMap, recipe

from .replay import Layer, Linear, product

BF16 = recipe("bf16")
PATH = "dw"
"""Of a weight's gradient through the run's own program of the whole layer, fused passes included."""


def agreement(q: jax.Array, b: jax.Array) -> dict[str, jax.Array]:
    """float32 scalars."""
    q, b = (t.astype(jnp.float32).reshape(-1) for t in (q, b))
    scale = jnp.maximum(jnp.max(jnp.abs(b)), jnp.float32(1e-30))
    q, b = q / scale, b / scale  # gradients of 1e-8 would underflow when squared
    power, cross, own = jnp.sum(b * b), jnp.sum(q * b), jnp.sum(q * q)
    noise = jnp.sum((q - b) ** 2)
    tiny = jnp.float32(1e-30)
    return {
        "gain": cross / jnp.maximum(power, tiny),
        "bias": jnp.mean(q - b) / jnp.maximum(jnp.sqrt(power / q.size), tiny),
        "cosine": cross / jnp.maximum(jnp.sqrt(own * power), tiny),
        "snr_db": 10 * jnp.log10(jnp.maximum(power, tiny) / jnp.maximum(noise, tiny * 1e-6)),
    }


def three_gemms(given: Linear, chosen: Recipe, ctx: Context) -> dict[str, jax.Array]:
    """y, dx and dw of the linear under a recipe."""
    y, back = jax.vjp(lambda x, w: product(x, w, chosen, given.key, ctx), given.x, given.w)
    dx, dw = back(given.dy.astype(y.dtype))
    return {"fprop": y, "dgrad": dx, "wgrad": dw}


def look_for_truth(ctx: Context) -> Any:
    """A `Look`: site -> GEMM -> agreement, for every quantized linear; GEMM `dw` is the layer's own gradient."""

    def look(linears: list[Linear], layer: Layer) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        quantized = [given for given in linears if given.recipe.quantized]
        for given in quantized:
            ours, plain = (three_gemms(given, chosen, ctx) for chosen in (given.recipe, BF16))
            found[given.site] = {gemm: agreement(ours[gemm], plain[gemm]) for gemm in ours}
        if quantized:
            recipes = {f"layers/{given.site}": given.recipe for given in linears}
            _, ours_dw = layer.again(RecipeMap(recipes))
            _, plain_dw = layer.again(RecipeMap(dict.fromkeys(recipes, BF16)))
            for given in quantized:
                group, _, name = given.site.partition("/")
                found[given.site][PATH] = agreement(ours_dw[group][name], plain_dw[group][name])
        return found

    return look
