"""Is the mean over draws the number itself? Gain and error of recipes' gradient operands, over 10^7 rounded numbers.

    python benchmarks/rounding_bias.py [--draws 640] [--recipes nvfp4,nvfp4_unbiased,...]

For y = the operand as it is quantized (after its Hadamard transform) and v = what its codes stand for: the gain is
<v, y> / <y, y> over all draws, 1 if the rounding is unbiased; the error is |v - y|^2 / |y|^2 of one draw. Half of the
numbers are normal, half have Student's t distribution with three degrees of freedom. Prints JSON.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import halfbyte as hb
from halfbyte.formats import hadamard_transform
from halfbyte.formats.hadamard import random_signs
from halfbyte.ops.operand import dequantize_operand, quantize_operand

SHAPE = (128, 128)
RECIPES = "nvfp4,nvfp4_unbiased,nvfp4_4over6_sr,ue5m3,tetrajet2,quartet2"


def tensor():
    rng = np.random.default_rng(0)
    rows = SHAPE[0] // 2
    drawn = np.concatenate([rng.normal(size=(rows, SHAPE[1])), rng.standard_t(3, size=(rows, SHAPE[1]))])
    return jnp.asarray(drawn, jnp.float32)


def measured(policy, x, draws):
    """(gain, error of a draw) of an operand policy, without a source."""

    def one(key):
        bits, signs = jax.random.split(key)
        drawn = random_signs(signs, policy.hadamard_size) if policy.uses_random_signs else None
        y = hadamard_transform(x, points=policy.hadamard_size, signs=drawn) if policy.hadamard else x
        y = y.astype(jnp.float32)
        v = dequantize_operand(quantize_operand(x, policy, axis=-1, key=bits, signs=signs))
        return jnp.sum(v * y), jnp.sum(y * y), jnp.sum((v - y) ** 2)

    keys = jax.random.split(jax.random.key(7), draws)
    sums = jax.jit(lambda keys: jax.lax.map(one, keys))(keys)
    cross, square, error = (np.asarray(s, np.float64).sum() for s in sums)
    return cross / square, error / square


def main(draws: int = 640, recipes: str = RECIPES):
    x = tensor()
    for name in recipes.split(","):
        policy = hb.recipe(name).dgrad_dy
        gain, error = measured(policy, x, draws)
        found = {"gain": round(gain, 5), "error": round(error, 5), "numbers": x.size * draws}
        print(json.dumps({"recipe": name, "dgrad_dy": str(policy)} | found | {"jax": jax.__version__}), flush=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
