"""One linear under NVFP4, emulated in several ways, in one run and one table: forward, and forward + backward.

    python benchmarks/emulations.py [--out emulations.json] [--shapes 16384x4096x14336,16384x2048x8192] [--skip compile]

x [tokens, inputs] bfloat16 times w [inputs, outputs] float32 (master weights), gradients for both. Ratios are speeds
against the plain bfloat16 matmul of JAX in the same run. Beside Halfbyte's `qdot`: the recipe written in PyTorch
(`torch_emulation.py`), eager and under `torch.compile`, and JAX's own `scaled_dot_general`, which quantizes the
forward pass only. Codes and scales are compared with `halfbyte.formats` on this device before anything is timed;
`differing` counts them, and eager PyTorch that differs has no time. `noise` is |y - y of bf16| / |y of bf16|: about 0.1
under a 4-bit format, near 0 for a program from which a compiler has removed the quantization.
"""

import argparse
import concurrent.futures
import dataclasses
import importlib.util
import json
import os
import pathlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # two frameworks share one GPU

from halfbyte.devices.platform import load_jax_quietly, settle_platform  # noqa: E402

if settle_platform(os.environ):
    load_jax_quietly()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from kernel_timing import environment, random_array, seconds, warm_clocks  # noqa: E402

from halfbyte import conformance, ops  # noqa: E402
from halfbyte.cli.screen import console, table  # noqa: E402
from halfbyte.formats import NVFP4, QTensor, hadamard16, quantize, random_bytes, store, to_grid  # noqa: E402
from halfbyte.ops.backends import choose, fp8  # noqa: E402
from halfbyte.recipe import recipe  # noqa: E402

SHAPES = "16384x4096x14336,16384x2048x8192"  # tokens x inputs x outputs: linears of an 8B and of a 1B Llama
BASE, EAGER, COMPILED = "bf16 matmul", "nvfp4 emulation, eager", "nvfp4 emulation, torch.compile"
PARTS = ("halfbyte", "scaled", "torch", "compile")
COLUMNS = ("linear", "program", "fwd ms", "vs bf16", "fwd + bwd ms", "vs bf16", "TFLOP/s", "differing", "noise", "note")
ROWS_FOR_NOISE = 256
Tree = Any
Program = Callable[..., Tree]


@dataclasses.dataclass
class Row:
    """One program at one shape. None where nothing was measured; `note` says why."""

    shape: tuple[int, int, int]
    framework: str
    name: str
    forward_ms: float | None = None
    forward_ratio: float | None = None
    both_ms: float | None = None
    both_ratio: float | None = None
    tflops: float | None = None  # of what was measured: forward + backward, else forward
    differing: int | None = None  # codes and scale bytes, of all operands together
    operands: dict[str, int] = dataclasses.field(default_factory=dict)
    noise: float | None = None
    note: str = ""


@dataclasses.dataclass
class Case:
    """What makes a row: programs of (x, w) and of (x, w, dy), either None if there is none."""

    row: Row
    forward: Program | None
    both: Program | None
    backend: str = ""  # of Halfbyte


@dataclasses.dataclass
class Data:
    x: jax.Array  # [tokens, inputs] bfloat16
    w: jax.Array  # [inputs, outputs] float32
    dy: jax.Array  # [tokens, outputs] bfloat16


def make_data(shape: tuple[int, int, int]) -> Data:
    tokens, inputs, outputs = shape
    w = random_array((inputs, outputs), 1, jnp.float32, size=inputs**-0.5)
    return Data(random_array((tokens, inputs), 0), w, random_array((tokens, outputs), 2, size=1e-3))


def with_gradients(forward: Program) -> Program:
    """(x, w, dy) -> (y, dx, dw)."""

    def both(x: jax.Array, w: jax.Array, dy: jax.Array) -> Tree:
        y, pull = jax.vjp(forward, x, w)
        return y, pull(dy)

    return both


def plain(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.matmul(x, w.astype(jnp.bfloat16), preferred_element_type=jnp.bfloat16)


def halfbyte_cases(shape: tuple[int, int, int], data: Data) -> Iterator[Case]:
    for name in ("nvfp4", "fp8"):
        timed, right = set(), conformance.definition(recipe(name), data.x, data.dy, data.w)
        for backend in ("auto", "carrier"):
            problem = ops.Problem(recipe(name), *shape, ops.target(), dtype="bfloat16")
            served = choose(backend, problem)
            row = Row(shape, "Halfbyte", f"qdot {name}, {backend}", note=f"backend {served.name}")
            if served.name in timed:
                row.note = f"not run: auto is {served.name} here"
                yield Case(row, None, None)
                continue
            timed.add(served.name)
            row.differing = conformance.differing(
                recipe(name), served.passes, served.for_weight, data.x, data.dy, data.w, right
            )
            if row.differing:
                row.note = f"not run: operands of {served.name} differ from the definition"
                yield Case(row, None, None)
                continue

            def forward(x: jax.Array, w: jax.Array, name: str = name, backend: str = backend) -> jax.Array:
                return ops.qdot(x, w, recipe=recipe(name), key=jax.random.key(3), backend=backend)

            yield Case(row, forward, with_gradients(forward), served.name)


def scaled_cases(shape: tuple[int, int, int], data: Data) -> Iterator[Case]:
    """`jax.nn.scaled_dot_general`: forward only, because its backward pass under nvfp4 is a plain matmul."""
    for mode in ("nvfp4", "mxfp8"):

        def forward(x: jax.Array, w: jax.Array, mode: str = mode) -> jax.Array:
            w = w.astype(jnp.bfloat16)
            configs = [config(mode, x), config(mode, w), config(mode, x)]
            dims = (((1,), (0,)), ((), ()))
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                return jax.nn.scaled_dot_general(x, w, dims, preferred_element_type=jnp.bfloat16, configs=configs)

        yield Case(Row(shape, "JAX", f"scaled_dot_general {mode}", note="1D weights, forward only"), forward, None)


def config(mode: Any, x: jax.Array) -> Any:
    if mode != "nvfp4":
        return jax.nn.get_scaled_dot_general_config(mode)
    scale = jnp.max(jnp.abs(x)).astype(jnp.float32).reshape(1) / jnp.float32(6 * 448)
    return jax.nn.get_scaled_dot_general_config(mode, scale)


def compile_jax(program: Program, backend: str, args: tuple[jax.Array, ...]) -> Program:
    """The program compiled; for the fp8 backend as the trainer compiles it."""
    if backend != fp8.BACKEND.name:
        return jax.jit(program).lower(*args).compile()
    with fp8.one_call():
        compiled = jax.jit(program).lower(*args).compile(compiler_options=fp8.COMPILER_OPTIONS)
    if fp8.stray_gemms(compiled.as_text()):
        raise RuntimeError("XLA compiled an 8-bit GEMM as something else")
    return compiled


def measure_jax(cases: list[Case], data: Data, threads: int) -> np.ndarray | None:
    """Times all cases, after compiling them side by side; the base's first rows of y."""
    forward, both = (data.x, data.w), (data.x, data.w, data.dy)
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        jobs = [
            [
                (pool.submit(compile_jax, program, case.backend, args), args) if program else None
                for program, args in ((case.forward, forward), (case.both, both))
            ]
            for case in cases
        ]
    if jax.default_backend() == "gpu":
        warm_clocks()
    base = None
    for case, pair in zip(cases, jobs, strict=True):
        for field, job in zip(("forward_ms", "both_ms"), pair, strict=True):
            if job is None:
                continue
            try:
                program, args = job[0].result(), job[1]
                setattr(case.row, field, 1e3 * seconds(lambda sets, p=program: p(*sets[0]), [args]))
                if field == "forward_ms":
                    y = np.asarray(program(*args)[:ROWS_FOR_NOISE].astype(jnp.float32))
                    base = y if base is None else base
                    case.row.noise = noise(y, base)
            except Exception as error:  # a benchmark reports the failure and goes on
                case.row.note = failure(error)
    return base


def noise(y: np.ndarray, base: np.ndarray) -> float:
    return float(np.linalg.norm(y - base) / np.linalg.norm(base))


def failure(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"not run: {type(error).__name__}: {lines[0][:140]}"


def definition(data: Data, bytes_: jax.Array) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Codes and scale bytes of the recipe's five operands by `halfbyte.formats`, one program each."""
    x, dy = data.x, data.dy
    stochastic = jax.jit(quantize_with)
    made = {
        "fprop_x": jax.jit(lambda a: quantize(a, NVFP4))(x),
        "fprop_w": jax.jit(lambda a: quantize(a, NVFP4, block="2d"))(data.w),
        "dgrad_dy": stochastic(dy, bytes_),
        "wgrad_x": jax.jit(lambda a: quantize(hadamard16(a.T), NVFP4))(x),
        "wgrad_dy": stochastic(hadamard16(dy.T), bytes_.T),
    }
    return {name: (np.asarray(q.codes), np.asarray(q.scales).view(np.uint8)) for name, q in made.items()}


def quantize_with(a: jax.Array, bytes_: jax.Array) -> QTensor:
    return store(to_grid(a, NVFP4, noise=bytes_), NVFP4, block="1d")


def count_differing(found: dict[str, Any], expected: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, int]:
    """Operand -> codes and scale bytes that differ."""
    return {
        name: sum(
            int((a.cpu().numpy().ravel() != b.ravel()).sum()) for a, b in zip(found[name], expected[name], strict=True)
        )
        for name in expected
    }


def right(row: Row) -> bool:
    """Whether no code of the row differs, but for one in a million of the transformed operands.

    A GEMM sums the 16 products of the transform in an order of its own; that shows where a run spans over 16 binades.
    """
    elements = {"wgrad_x": row.shape[0] * row.shape[1], "wgrad_dy": row.shape[0] * row.shape[2]}
    return all(count <= elements.get(name, 0) / 1e6 for name, count in row.operands.items())


def torch_cases(
    shape: tuple[int, int, int], data: Data, *, compiled: bool, known: dict[str, int] | None = None
) -> tuple[list[Case], tuple[Any, ...], Any]:
    """Cases, their arguments (x, w, dy) and what waits for the device; torch must be there.

    `known` are the differing codes of the compiled emulation, counted at another shape: compiling it only for that
    count takes as long as compiling what is timed.
    """
    import torch
    import torch_emulation as emulation

    warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # a CPU without bfloat16 units

    device = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"
    x, w, dy = (torch.from_numpy(np.array(a.astype(jnp.float32))).to(device) for a in (data.x, data.w, data.dy))
    x, dy = x.to(torch.bfloat16).requires_grad_(), dy.to(torch.bfloat16)
    w.requires_grad_()
    matrix = emulation.hadamard_matrix(device)
    bytes_ = random_bytes(jax.random.key(5), data.dy.shape)
    expected = definition(data, bytes_)
    drawn = torch.from_numpy(np.array(bytes_)).to(device)

    def gradients(forward: Program) -> Program:
        def both(x: Any, w: Any, dy: Any) -> Tree:
            y = forward(x, w)
            return y, torch.autograd.grad(y, (x, w), dy)

        return both

    def emulated(name: str, wrap: Callable[[Program], Program], known: dict[str, int] | None = None) -> Case:
        row = Row(shape, "PyTorch", name, note="codes compared at the first shape" if known else f"on {device}")
        try:
            with torch.no_grad():
                row.operands = known or count_differing(wrap(emulation.operands)(x, w, dy, matrix, drawn), expected)
        except Exception as error:  # a compiler that is not there, say
            row.note = failure(error)
            return Case(row, None, None)
        row.differing = sum(row.operands.values())
        linear = wrap(emulation.linear)
        forward = lambda x, w: linear(x, w, matrix)  # noqa: E731
        return Case(row, forward, gradients(forward))

    def multiply(x: Any, w: Any) -> Any:
        return x @ w.to(torch.bfloat16)

    cases = [
        Case(Row(shape, "PyTorch", BASE, note=f"on {device}"), multiply, gradients(multiply)),
        emulated(EAGER, lambda f: f),
    ]
    if not right(cases[1].row):
        cases[1].row.note = "not run: codes differ from the definition"
        cases[1].forward = cases[1].both = None
    if compiled:
        torch._dynamo.reset()
        cases.append(emulated(COMPILED, lambda f: torch.compile(f, dynamic=False), known))
    wait = (lambda _: torch.cuda.synchronize()) if device == "cuda" else (lambda _: None)
    return cases, (x, w, dy), wait


def measure_torch(cases: list[Case], args: tuple[Any, ...], wait: Any, base: np.ndarray | None) -> None:
    x, w, dy = args
    for case in cases:
        try:
            if case.forward is not None:
                case.row.forward_ms = 1e3 * seconds(lambda sets, f=case.forward: f(*sets[0]), [(x, w)], wait=wait)
                y = case.forward(x, w)[:ROWS_FOR_NOISE].detach().float().cpu().numpy()
                case.row.noise = None if base is None else noise(y, base)
            if case.both is not None:
                case.row.both_ms = 1e3 * seconds(lambda sets, f=case.both: f(*sets[0]), [(x, w, dy)], wait=wait)
        except Exception as error:  # a benchmark reports the failure and goes on
            case.row.note = failure(error)


def absent(shape: tuple[int, int, int], framework: str, names: list[str], why: str) -> list[Row]:
    return [Row(shape, framework, name, note=f"absent: {why}") for name in names]


def measure_shape(
    shape: tuple[int, int, int], skip: set[str], threads: int, known: dict[str, int] | None = None
) -> list[Row]:
    data = make_data(shape)
    cases = [Case(Row(shape, "JAX", BASE), plain, with_gradients(plain))]
    rows: list[Row] = []
    for part, make in (("halfbyte", halfbyte_cases), ("scaled", scaled_cases)):
        if part not in skip:
            cases += make(shape, data)
    base = measure_jax(cases, data, threads)
    rows += [case.row for case in cases]
    if "torch" in skip:
        rows += absent(shape, "PyTorch", [BASE, EAGER, COMPILED], "skipped")
    elif importlib.util.find_spec("torch") is None:
        rows += absent(shape, "PyTorch", [BASE, EAGER, COMPILED], "torch is not installed")
    else:
        torch_made, args, wait = torch_cases(shape, data, compiled="compile" not in skip, known=known)
        measure_torch(torch_made, args, wait, base)
        rows += [case.row for case in torch_made]
        if "compile" in skip:
            rows += absent(shape, "PyTorch", [COMPILED], "skipped")
    return with_ratios(rows)


def with_ratios(rows: list[Row]) -> list[Row]:
    """The rows with speeds relative to the first, and TFLOP/s."""
    base = rows[0]
    for row in rows:
        work = 2 * float(np.prod(row.shape))
        if row.forward_ms and base.forward_ms:
            row.forward_ratio = base.forward_ms / row.forward_ms
            row.tflops = work / row.forward_ms / 1e9
        if row.both_ms and base.both_ms:
            row.both_ratio = base.both_ms / row.both_ms
            row.tflops = 3 * work / row.both_ms / 1e9
    return rows


def cells(row: Row) -> tuple[str, ...]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    tokens, inputs, outputs = row.shape
    return (
        f"{tokens} x {inputs} x {outputs}", f"{row.framework}: {row.name}",
        number(row.forward_ms, ".3f"), number(row.forward_ratio, ".3f"), number(row.both_ms, ".3f"),
        number(row.both_ratio, ".3f"), number(row.tflops, ".1f"), number(row.differing, "d"),
        number(row.noise, ".4f"), row.note,
    )  # fmt: skip


def torch_version() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch.__version__


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=None)
    parser.add_argument("--shapes", default=SHAPES, help="tokens x inputs x outputs, multiples of 128 for the kernels")
    parser.add_argument("--skip", default="", help=f"parts to leave out, of {', '.join(PARTS)}")
    parser.add_argument("--threads", type=int, default=8, help="compilations at a time")
    parser.add_argument("--budget", type=float, default=70.0, help="seconds after which no further shape starts")
    args = parser.parse_args(argv)
    skip = set(filter(None, args.skip.split(",")))
    if skip - set(PARTS):
        parser.error(f"--skip knows {', '.join(PARTS)}, got {args.skip}")
    started, rows = time.time(), []
    report: dict[str, Any] = {"environment": {**environment(), "torch": torch_version()}}
    for text in args.shapes.split(","):
        if time.time() - started > args.budget:
            console().print(f"{text} not measured: {time.time() - started:.0f} s spent; raise --budget")
            continue
        tokens, inputs, outputs = (int(n) for n in text.split("x"))
        known = next((row.operands for row in rows if row.name == COMPILED and row.operands), None)
        rows += measure_shape((tokens, inputs, outputs), skip, args.threads, known)
        report["rows"] = [dataclasses.asdict(row) for row in rows]
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        console().print(f"-- {text} done at {time.time() - started:.0f} s")
    console().print(table(COLUMNS, map(cells, rows), title=" ".join(map(str, report["environment"].values()))))
    return 0 if all(right(row) for row in rows if row.name == EAGER) else 3


if __name__ == "__main__":
    raise SystemExit(main())
