"""What `gpu_kernels.py` times of RMSNorm: the kernels beside XLA's passes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_timing import Case, random_array

from halfbyte.kernels.rms_norm import rms_norm_backward, rms_norm_forward, unsupported_norm
from halfbyte.ops.operand import add_and_round
from halfbyte.ops.rms_norm_vjp import rms_norm

EPS = 1e-5


def by_xla(x: jax.Array, scale: jax.Array, carry: jax.Array, *gradients: jax.Array) -> Any:
    """The gradient as a block without kernels has it."""
    _, pull = jax.vjp(lambda x, s: rms_norm(x, s, EPS), x, scale)
    total = gradients[0]
    for each in gradients[1:]:
        total = add_and_round(total, each)
    dx, ds = pull(total)
    return carry + dx, ds


def by_kernel(x: jax.Array, scale: jax.Array, carry: jax.Array, *gradients: jax.Array) -> Any:
    """The same; r is made first, as XLA makes it above."""
    return only_backward(x, rms_norm_forward(x, scale, eps=EPS)[1], scale, carry, *gradients)


def forward_by_kernel(x: jax.Array, scale: jax.Array) -> jax.Array:
    return rms_norm_forward(x, scale, eps=EPS)[0]


def only_backward(x: jax.Array, inverse: jax.Array, scale: jax.Array, carry: jax.Array, *gradients: jax.Array) -> Any:
    dx, parts = rms_norm_backward(x, inverse, scale, carry, gradients)
    return dx, jnp.sum(parts, axis=0)


def cases(shapes: list[tuple[int, int]]) -> list[Case]:
    made = []
    for shape in shapes:
        if unsupported_norm(*shape):
            continue
        elements, scale = float(np.prod(shape)), random_array(shape[1:], 9, jnp.float32)
        xs = [(random_array(shape, i),) for i in range(4)]
        made.append(Case("copy", shape, "negate", jnp.negative, xs, 4 * elements))
        forward = [(x, scale) for (x,) in xs]
        made.append(Case("norm", shape, "kernel", forward_by_kernel, forward, 4 * elements))
        made.append(Case("norm xla", shape, "xla", functools.partial(rms_norm, eps=EPS), forward, 4 * elements))
        for readers in (1, 3):
            others = [random_array(shape, 20 + i) for i in range(readers + 1)]
            sets, work = [(x, scale, *others) for (x,) in xs], 2 * elements * (3 + readers)
            inverse = jnp.ones(shape[:1], jnp.float32)
            alone = [(x, inverse, scale, *others) for (x,) in xs]
            made.append(Case(f"backward of {readers}", shape, "kernel", only_backward, alone, work))
            made.append(Case(f"both of {readers}", shape, "kernel", by_kernel, sets, work))
            made.append(Case(f"both of {readers} xla", shape, "xla", by_xla, sets, work))
    return made
