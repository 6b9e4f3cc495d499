"""Training for models that nobody here wrote: 100 steps in one jitted scan, in bf16, in NVFP4, and with noise for
codes.
"""

import contextlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfbyte.ops.operand
from halfbyte.formats import random_bytes
from halfbyte.recipes import recipe, step_key

sys.path.insert(0, str(Path(__file__).parent))  # published: the models

STEPS = 100


@pytest.fixture(autouse=True, scope="module")
def _quick(quick_compiles):
    """Compiling is most of what these tests cost, and the numbers do not depend on how hard LLVM tries."""


@pytest.fixture(scope="module", autouse=True)
def promotion_as_others_expect_it():
    """The strict promotion of our own tests is not for other people's code."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Breaking:
    """Of a quantizer that makes up its codes: whether programs that are traced ask for it, and what they are told."""

    asked, now = False, False


@pytest.fixture(scope="module", autouse=True)
def quantizers_that_can_break():
    """A quantizer that breaks keeps its scales and makes up its codes, as a broken kernel would. A program that asks
    does so at every call, and is compiled once; else all is as it is."""
    real = halfbyte.ops.operand.quantize_to_grid
    values = jnp.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], jnp.float32)

    def breakable(x, fmt, **options):
        grid = real(x, fmt, **options)
        if not Breaking.asked:
            return grid
        broken = jax.pure_callback(lambda: np.bool_(Breaking.now), jax.ShapeDtypeStruct((), jnp.bool_))
        made_up = values[random_bytes(jax.random.key(0), grid.values.shape) & 15]
        return grid._replace(values=jnp.where(broken, made_up, grid.values))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(halfbyte.ops.operand, "quantize_to_grid", breakable)
        yield


@pytest.fixture(scope="session")
def train():
    """train(loss, params, batch) -> run() -> (first loss, mean of the last 10) of 100 Adam steps."""

    def program(loss, params, batch):
        optimizer = optax.adam(0.01)

        def step(state, number):
            params, moments = state
            value, gradient = jax.value_and_grad(loss)(params, *batch(jax.random.key(number)), step_key(0, number))
            updates, moments = optimizer.update(gradient, moments, params)
            return (optax.apply_updates(params, updates), moments), value

        @jax.jit
        def whole(params):
            losses = jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(STEPS))[1]
            return losses[0], losses[-10:].mean()

        return lambda: tuple(float(loss) for loss in whole(params))

    return program


@pytest.fixture(scope="session")
def verdict(train):
    """Trains a model in bf16 and in NVFP4, and holds both to what the recipe promises; of one model a task also with
    made-up codes (`control`), which must not pass: the task can tell."""

    def check(loss_in, params, batch, *, control):
        first, bf16 = train(loss_in(recipe("bf16")), params, batch)()
        assert first > 1.3 * bf16, "the task must be learned, or losing nothing would say nothing"
        run = train(loss_in(recipe("nvfp4")), params, batch)
        with asked() if control else contextlib.nullcontext():
            _, nvfp4 = run()
            assert nvfp4 < 1.05 * bf16
            print(f"{first:.3f} -> bf16 {bf16:.3f}, nvfp4 {nvfp4:.3f}")
            if control:
                Breaking.now = True
                assert not run()[1] < 1.05 * bf16

    return check


@contextlib.contextmanager
def asked():
    """Programs that are traced here ask. Linears of one shape are traced once, so nothing is kept from before, nor for
    later."""
    jax.clear_caches()
    Breaking.asked = True
    try:
        yield
    finally:
        Breaking.asked = Breaking.now = False
        jax.clear_caches()


@pytest.fixture(scope="session")
def text():
    """A batch of 8 sequences of 16 tokens of 32 kinds, each drawn from the two before it: [8, 17]."""
    table = jnp.asarray(
        np.random.default_rng(2).normal(size=(32, 32, 32)) * 0.5 + np.random.default_rng(3).normal(size=(1, 32, 32)) * 2
    )
    table = table.astype(jnp.float32)

    def batch(key):
        def draw(state, key):
            before, last = state
            new = jax.random.categorical(key, table[before, last])
            return (last, new), new

        first = jax.random.randint(key, (2, 8), 0, 32)
        return (jax.lax.scan(draw, (first[0], first[1]), jax.random.split(key, 17))[1].T,)

    return batch


@pytest.fixture(scope="session")
def nvfp4():
    return recipe("nvfp4")
