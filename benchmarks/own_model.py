"""Somebody's own Llama in plain JAX, and the same with one line more: what `hb.apply_recipe` costs and what it gains.

Eight layers in a scan, 2048 wide, 8192 hidden, float32 masters cast to bf16, cuDNN attention, 4 x 4096 tokens; SGD, so
that the step is the model's. Prints one JSON: for bf16 and for each recipe the milliseconds of a step (median of
`--steps`, and their spread), the ratio bf16 / recipe, the seconds of trace and compile, and the loss.

    python benchmarks/own_model.py                         # on one GPU
"""

import functools
import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import tyro

import halfbyte as hb
from halfbyte.cli.bench import bench_versions
from halfbyte.recipes import step_key

VOCABULARY, HEADS = 32768, 16
ARMS = {"bf16": None, "nvfp4 mlp": ("mlp", "nvfp4"), "nvfp4 all_linear": ("all_linear", "nvfp4"),
        "fp8 all_linear": ("all_linear", "fp8")}  # fmt: skip
STAGES = {"jaxpr_trace": "trace_s", "jaxpr_to_mlir": "lower_s", "backend_compile": "xla_s"}  # as JAX reports them


def init(key, *, layers=8, width=2048, hidden=8192, vocabulary=VOCABULARY):
    shapes = {"q": (width, width), "k": (width, width), "v": (width, width), "o": (width, width)}
    shapes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    keys = iter(jax.random.split(key, len(shapes) + 1))
    stack = {n: jax.random.normal(next(keys), (layers, *s), jnp.float32) * s[0] ** -0.5 for n, s in shapes.items()}
    stack |= {"norm_1": jnp.ones((layers, width)), "norm_2": jnp.ones((layers, width))}
    table = jax.random.normal(next(keys), (vocabulary, width), jnp.float32) * 0.02
    return {"layers": stack, "embed": table, "norm": jnp.ones(width)}


def norm(x, scale):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


def rope(x):
    positions = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(0, x.shape[-1] // 2) * 2 / x.shape[-1])
    sin, cos = (f(positions)[:, None].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def loss(params, tokens, *, heads=HEADS, attention="cudnn"):
    narrow = lambda w: w.astype(jnp.bfloat16)  # noqa: E731
    x = narrow(params["embed"])[tokens]

    def layer(x, p):
        y = norm(x, p["norm_1"])
        q, k, v = ((y @ narrow(p[name])).reshape(*y.shape[:2], heads, -1) for name in "qkv")
        attended = jax.nn.dot_product_attention(rope(q), rope(k), v, is_causal=True, implementation=attention)
        x = x + attended.reshape(x.shape) @ narrow(p["o"])
        y = norm(x, p["norm_2"])
        return x + (jax.nn.silu(y @ narrow(p["gate"])) * (y @ narrow(p["up"]))) @ narrow(p["down"]), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = (norm(x, params["norm"])[:, :-1] @ narrow(params["embed"]).T).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


def step(arm, params, tokens, number):
    fn = loss
    if ARMS[arm] is not None:
        fn = hb.apply_recipe(loss, hb.policy(*ARMS[arm]), key=step_key(0, number), show=None)
    value, gradients = jax.value_and_grad(fn)(params, tokens)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, params, gradients), value


def jitted(arm):
    """bf16 as its owner would, by `jax.jit`; the others by `hb.jit`."""
    run = functools.partial(step, arm)
    if ARMS[arm] is None:
        return jax.jit(run, donate_argnums=0)
    return hb.jit(run, hb.policy(*ARMS[arm]), donate_argnums=0)


def measured(arm, shape, steps):
    params, tokens = init(jax.random.key(0)), jax.random.randint(jax.random.key(1), shape, 0, VOCABULARY)
    run, times, values = jitted(arm), [], []
    jax.block_until_ready(params)
    spent = dict.fromkeys(STAGES.values(), 0.0)

    def listen(event, seconds, **_):
        for part, name in STAGES.items():
            spent[name] += seconds if part in event else 0.0

    jax.monitoring.register_event_duration_secs_listener(listen)
    for number in range(steps + 3):
        begin = time.perf_counter()
        params, value = run(params, tokens, jnp.int32(number))
        values.append(float(value))
        times.append(time.perf_counter() - begin)
    low, median, high = (1e3 * t for t in statistics.quantiles(times[3:], n=4))
    losses = {"first_loss": values[0], "last_loss": values[-1]}
    return {"compile_s": times[0] - times[-1], "ms": median, "quartiles": [low, high]} | losses | spent


def main(arms: tuple[str, ...] = tuple(ARMS), steps: int = 20, batch: int = 4, seq: int = 4096):
    found = {}
    for arm in arms:
        found[arm] = measured(arm, (batch, seq), steps)
        if "bf16" in found:
            base = found["bf16"]
            found[arm]["ms_ratio"] = base["ms"] / found[arm]["ms"]
            found[arm]["compile_s_ratio"] = found[arm]["compile_s"] / base["compile_s"]
        print(arm, found[arm], file=sys.stderr, flush=True)
    print(json.dumps(bench_versions() | {"shape": (batch, seq), "arms": found}))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
