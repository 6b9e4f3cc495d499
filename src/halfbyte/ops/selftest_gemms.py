"""Self-test of native GEMMs: all three directions against backend `emulated`, before the first step.

A released kernel once rounded every gradient to zero on one GPU. `emulated` and the native GEMM get operands of equal
values, the native ones from the passes and at the sizes of the run. They may differ in the order of accumulation and in
the rounding to bfloat16, twice for a native GEMM: each element must agree to 2^-7 of the amax of its row.

On a GPU model without a verdict `run_gemm_selftest_once` runs the test once and caches the verdict on this machine, in
`cards.json`.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from halfbyte import recipes
from halfbyte.devices import NOT_ASKED, Device, cudnn_version, distrust_reason, lookup, record_device_verdict
from halfbyte.io import read_json, user_cache, write_json
from halfbyte.kernels.blackwell_grouped_gemm import OUTPUT_TILE_SIZE
from halfbyte.ops.grouped_dot import grouped_qdot
from halfbyte.ops.qdot import qdot
from halfbyte.recipes import Recipe

TOLERANCE = 2.0**-7


GEMM_SIZES = (256, 128, 384)


MAX_SELFTEST_TOKENS = 4096  # enough for every path through a kernel; one second on any GPU


EXPERT_COUNTS = (1537, 0, 1, 640, 128, 129, 15, 900)  # rows per expert: none, whole and partial tiles


MAX_TEST_TILES = 4 * 160  # of a result at least, so that each SM of a GPU loops over several


CACHE_FILE = "cards.json"


SELFTEST_VERSION = 1  # of the cached verdict; to be raised with a change of the native GEMMs


class SelfTestFailed(Exception):
    """Raised if a kernel of this device differs from the reference."""


def run_gemm_selftest_once(say: Callable[[str], None]) -> str | None:
    """Compares native with emulated GEMMs if the GPU model has no verdict yet, and reports what `auto` chooses.

    Returns why `auto` emulates, or None. The cached verdict holds for this GPU model, cuDNN, JAX and SELFTEST_VERSION.
    """
    device = lookup(jax.devices()[0])
    if distrust_reason(device) != NOT_ASKED:
        return distrust_reason(device)
    verdicts, key = _cached_verdicts(), _cache_key(device)
    if isinstance(verdicts.get(key), str):
        record_device_verdict(device, verdicts[key])
        refused = f"emulated, because {verdicts[key]}; remove {user_cache() / CACHE_FILE} and it is asked again"
        say(f"{device.name} has answered before: 4-bit GEMMs are {refused if verdicts[key] else 'native'}")
        return distrust_reason(device)
    refusal, final = _run_selftest()
    record_device_verdict(device, refusal)
    if final:
        with contextlib.suppress(OSError):  # without the cache the next process runs the test again
            user_cache().mkdir(parents=True, exist_ok=True)
            write_json(user_cache() / CACHE_FILE, {**verdicts, key: refusal})
    verdict = f"emulated, because {refusal}" if refusal else "native: they equal emulated ones"
    say(f"{device.name} was asked: 4-bit GEMMs are {verdict}")
    return distrust_reason(device)


def compare_native_linears(sites: Iterable[tuple[str, Recipe, tuple[int, int, int]]]) -> dict[str, dict[str, float]]:
    """Runs `compare_native_gemms` for each (path, recipe, sizes), once for equal linears: path -> relative errors.

    Tokens are limited to MAX_SELFTEST_TOKENS, for time.
    """
    measured: dict[tuple[Recipe, tuple[int, int, int]], dict[str, float]] = {}
    errors = {}
    for path, recipe, (tokens, inputs, outputs) in sites:
        sizes = min(tokens, MAX_SELFTEST_TOKENS), inputs, outputs
        if (recipe, sizes) not in measured:
            measured[recipe, sizes] = compare_native_gemms(recipe, sizes=sizes, site=path)
        errors[path] = measured[recipe, sizes]
    return errors


def compare_native_gemms(
    recipe: Recipe, *, sizes: tuple[int, int, int] = GEMM_SIZES, site: str = "", candidate: str = "native"
) -> dict[str, float]:
    """Returns the largest relative error of fprop, dgrad and wgrad against `emulated`.

    `sizes`: (tokens, inputs, outputs) of the linear. Raises SelfTestFailed, which names `site`, beyond the tolerance.
    """
    tokens, inputs, outputs = sizes
    keys = jax.random.split(jax.random.key(7), 4)
    x = jax.random.normal(keys[0], (tokens, inputs), jnp.bfloat16)
    w = jax.random.normal(keys[1], (inputs, outputs), jnp.float32)
    dy = jax.random.normal(keys[2], (tokens, outputs), jnp.bfloat16)

    def directions(backend: str) -> dict[str, jax.Array]:
        def run(x: jax.Array, w: jax.Array, dy: jax.Array) -> dict[str, jax.Array]:
            y, pull = jax.vjp(lambda x, w: qdot(x, w, recipe=recipe, key=keys[3], backend=backend), x, w)
            dx, dw = pull(dy)
            return {"fprop": y, "dgrad": dx, "wgrad": dw}

        return jax.jit(run)(x, w, dy)

    where = f"{recipe.name}{f' at {site}' if site else ''} (sizes {sizes})"
    return _check_within_tolerance(directions("emulated"), directions(candidate), f"{candidate} GEMMs under {where}")


def compare_native_grouped_gemms(
    recipe: Recipe, *, sides: tuple[int, int], site: str = "", candidate: str = "auto",
    counts: Sequence[int] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Returns the largest relative errors of grouped GEMMs against a loop of `emulated` linears over experts.

    `sides`: (inputs, outputs) of an expert's matrix. `counts`: rows per expert. The experts' values differ by up to
    10^4, so that a row multiplied by another expert's weight is detected. Raises SelfTestFailed beyond the tolerance,
    and if the program does not run.
    """
    (inputs, outputs), min_rows = sides, MAX_TEST_TILES * OUTPUT_TILE_SIZE * OUTPUT_TILE_SIZE // min(sides) + 1
    load = np.asarray((max(EXPERT_COUNTS[0], min_rows), *EXPERT_COUNTS[1:]) if counts is None else counts, np.int32)
    keys = jax.random.split(jax.random.key(8), 4)
    rows = int(load.sum()) + 3  # the last three have no expert
    scale = np.repeat(np.float32(10.0) ** (np.arange(len(load) + 1, dtype=np.float32) % 5), np.append(load, 3))[:, None]
    x = (scale * jax.random.normal(keys[0], (rows, inputs))).astype(jnp.bfloat16)
    w = jax.random.normal(keys[1], (len(load), inputs, outputs), jnp.float32)
    dy = (jax.random.normal(keys[2], (rows, outputs)) / scale).astype(jnp.bfloat16)

    def directions(backend: str, *groups: jax.Array) -> dict[str, jax.Array]:
        def run(x: jax.Array, w: jax.Array, dy: jax.Array, *groups: jax.Array) -> dict[str, jax.Array]:
            def linear(x: jax.Array, w: jax.Array) -> jax.Array:
                return grouped_qdot(x, w, *(groups or (load,)), recipe=recipe, key=keys[3], backend=backend)

            y, pull = jax.vjp(linear, x, w)
            dx, dw = pull(dy)
            return {"fprop": y, "dgrad": dx, "wgrad": dw}

        return jax.jit(run)(x, w, dy, *groups)

    what = f"native GEMMs of experts under {recipe.name}{f' at {site}' if site else ''} (matrices of {sides})"
    try:
        results = jax.block_until_ready(directions(candidate, jnp.asarray(load)))
    except jax.errors.JaxRuntimeError as error:
        raise SelfTestFailed(
            f"self-test of {what} did not run ({' '.join(str(error).split())[:300]}); train with --precision.backend "
            "emulated, which emulates the recipe, and report this device"
        ) from None
    return _check_within_tolerance(directions("emulated"), results, what)


def max_relative_error(found: jax.Array, expected: jax.Array) -> float:
    """Returns the largest difference relative to the largest expected element of its row; inf if any is not finite."""
    found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
    size = jnp.maximum(jnp.max(jnp.abs(expected), axis=-1, keepdims=True), 1e-30)
    worst = float(jnp.max(jnp.abs(found - expected) / jnp.broadcast_to(size, expected.shape)))
    return worst if worst == worst else float("inf")


def _check_within_tolerance(expected: dict[str, jax.Array], found: dict[str, jax.Array], what: str) -> dict[str, float]:
    """Returns the error of each GEMM. Raises SelfTestFailed if one is beyond the tolerance or NaN."""
    deviations = {name: max_relative_error(found[name], expected[name]) for name in expected}
    wrong = [f"{name} off by {value:.3g}" for name, value in deviations.items() if not value <= TOLERANCE]
    if wrong:
        raise SelfTestFailed(
            f"self-test of {what} failed: "
            f"{', '.join(wrong)} of the largest element (limit {TOLERANCE:g}); nothing else is used in its place; "
            "train with --precision.backend emulated, which emulates the recipe, and report this device"
        )
    return deviations


def _run_selftest() -> tuple[str, bool]:
    """Returns why native GEMMs are refused ("" if they are not), and whether that verdict may be cached.

    A program that did not run (out of memory, no cuDNN engine) is not a verdict: the next process tries again.
    """
    try:
        compare_native_gemms(recipes.recipe("nvfp4"))
    except (SelfTestFailed, jax.errors.JaxRuntimeError, ValueError) as error:
        reason = f"the card's own are not right ({' '.join(str(error).split())[:300]})"
        return reason, isinstance(error, SelfTestFailed)
    return "", True


def _cached_verdicts() -> dict[str, str]:
    try:
        stored = read_json(user_cache() / CACHE_FILE)
    except (ValueError, OSError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _cache_key(device: Device) -> str:
    cudnn = ".".join(map(str, cudnn_version(device)))
    return f"{device.kind}; cuDNN {cudnn}; jax {jax.__version__}; question {SELFTEST_VERSION}"
