"""Digests of the linears' bits on CPU devices, to compare a change that must keep bits with an earlier commit.

    python tests/bits/digests.py --out A.json       # with PYTHONPATH=src of the earlier commit's worktree
    python tests/bits/digests.py --compare A.json   # prints what differs; exit code 1 if anything does

`qdot`, `mlp` and `grouped_qdot` with their VJPs. All recipes run eagerly on one device, under both CPU backends, and
under jit on fsdp=4,tensor=2; FEW of them in other variants and on the other meshes of the tests. `halfbyte train demo`
runs six steps. Digests hold for one JAX version and one kind of CPU. Kernels have tests in tests/ops/kernels.
"""

import argparse
import contextlib
import hashlib
import inspect
import json
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, run

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

# Every name of the package that this file uses, with its spellings in all commits, the newest first.
NAMES = {
    **{name: [f"halfbyte:{name}"] for name in "qdot mlp grouped_qdot quantize_weight recipe recipe_names".split()},
    **{name: [f"halfbyte.ops:{name}"] for name in ("Placement", "BACKENDS")},
}
BACKENDS = {"reference": ["reference"], "emulated": ["emulated", "carrier"]}
TRAIN = "train demo --steps 6 --batch 4 --seq 64 --model.layers 2 --no-sample".split()
FEW = ("fp8", "nvfp4")
MESHES = ((4, 1), (2, 2), (1, 4), (8, 1), (1, 8))  # fsdp, tensor
GROUPS = np.array([114, 0, 126])  # rows per expert, padded to 128 as the tokens of `qdot`: equal primitives
WAY_IN = P("fsdp", "tensor"), P("fsdp", "tensor"), P("fsdp", None, "tensor")  # of x, w and y
WAY_OUT = P("fsdp", None, "tensor"), P("tensor", "fsdp"), P("fsdp", "tensor")


def named(key):
    """Returns the object of that entry of NAMES under the first spelling that this commit has."""
    for module, _, attribute in (spelling.partition(":") for spelling in NAMES[key]):
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(import_module(module), attribute)
    raise SystemExit(f"{key}: none of {NAMES[key]} exists. Add the new name to NAMES.")


def bound(name, recipe, backend, **more):
    """Returns that op for a recipe and a backend, a key of BACKENDS or `auto`."""
    spelling = next((each for each in BACKENDS.get(backend, ()) if each in named("BACKENDS")), backend)
    more |= {"recipe": named("recipe")(recipe), "key": jax.random.key(7), "backend": spelling}
    return lambda *args: named(name)(*args, **more)


def residual_options():
    """Returns what `mlp` saves -> its option in this commit."""
    if "residuals" in inspect.signature(named("mlp")).parameters:
        return {name: {"residuals": name} for name in ("operands", "input")}
    return {"operands": {"mode": "fast"}, "input": {"mode": "input"}}


def array(seed, *shape, dtype="float32"):
    """Returns normal values times a scale per feature: the amax is last, the first 32 are zero."""
    random = np.random.default_rng(seed)
    values = random.normal(size=shape) * np.exp(random.normal(size=shape[-1]))
    values[(-1,) * len(shape)], values[(0,) * (len(shape) - 1)][:32] = 30, 0
    return jnp.asarray(values, dtype)


def operands(tokens, inputs, outputs):
    """Returns x, gate, up and down."""
    shapes = (inputs, outputs), (inputs, outputs), (outputs, inputs)
    return array(1, *tokens, inputs, dtype="bfloat16"), *(array(2 + i, *each) for i, each in enumerate(shapes))


def experts(copies=1):
    return array(5, copies * (GROUPS.sum() + 4), 128, dtype="bfloat16"), array(6, 3, 128, 128)


def digests(fn, args, *, jit=True):
    """Returns digests of fn(*args) and of its gradients for a fixed cotangent, or the exception of a refusal."""

    def step(*args):
        y, pullback = jax.vjp(fn, *args)
        return y, *pullback(array(9, *y.shape, dtype=y.dtype))

    try:
        results = (jax.jit(step) if jit else step)(*args)
    except (TypeError, ValueError, NotImplementedError) as error:  # recorded: a refusal that comes or goes differs
        return {"refused": type(error).__name__}
    data = [f"{a.dtype}{list(a.shape)}".encode() + np.asarray(a).tobytes() for a in results]
    return dict(zip(("y", "d0", "d1", "d2", "d3"), [hashlib.sha256(each).hexdigest()[:20] for each in data]))


def eager():
    args = operands((128,), 128, 128)
    for recipe in named("recipe_names")():
        for backend in BACKENDS:
            case = f"eager 1 {backend} {recipe}"
            yield f"{case} qdot", digests(bound("qdot", recipe, backend), args[:2], jit=False)
            for residuals, option in residual_options().items():
                yield f"{case} mlp {residuals}", digests(bound("mlp", recipe, backend, **option), args, jit=False)
            fn = bound("grouped_qdot", recipe, backend, groups=GROUPS)
            yield f"{case} grouped_qdot", digests(fn, experts(), jit=False)


def jitted():
    x, *weights = operands((2, 64), 128, 256)
    for recipe in FEW:
        case, qdot, grouped = f"jit 1 emulated {recipe}", bound("qdot", recipe, "emulated"), "grouped_qdot"
        codes = named("quantize_weight")(weights[0], recipe=named("recipe")(recipe))
        yield f"{case} qdot", digests(qdot, (x, weights[0]))
        yield f"{case} qdot 3 tokens", digests(qdot, (x[0, :3], weights[0]))
        yield f"{case} qdot float32", digests(qdot, (x.astype(jnp.float32), weights[0]))
        yield f"{case} qdot codes", digests(lambda x, qdot=qdot, codes=codes: qdot(x, codes), (x,))
        yield f"{case} mlp", digests(bound("mlp", recipe, "emulated"), (x, *weights))
        yield f"jit 1 auto {recipe} {grouped}", digests(bound(grouped, recipe, "auto", groups=GROUPS), experts())
        call = bound(grouped, recipe, "emulated")
        yield f"{case} {grouped} traced", digests(lambda x, w, call=call: call(x, w, jnp.add(GROUPS, 0)), experts())


def on_meshes():
    for recipe in named("recipe_names")():
        yield from on_mesh((4, 2), recipe, "emulated", with_mlp=recipe in FEW)
    pair = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))
    for recipe in FEW:
        yield from on_mesh((4, 2), recipe, "reference")
        for sizes in MESHES:
            yield from on_mesh(sizes, recipe, "emulated")
        fn = bound("grouped_qdot", recipe, "emulated", groups=GROUPS)
        halves = jax.shard_map(fn, mesh=pair, in_specs=(P("data"), P()), out_specs=P("data"))
        yield f"jit shard_map data=2 {recipe} grouped_qdot", digests(halves, experts(copies=2))


def on_mesh(sizes, recipe, backend, *, with_mlp=False):
    grid = Mesh(np.array(jax.devices()[: sizes[0] * sizes[1]]).reshape(sizes), ("fsdp", "tensor"))
    outer, inner = (named("Placement")(grid, *specs) for specs in (WAY_IN, WAY_OUT))
    case = f"jit fsdp={sizes[0]},tensor={sizes[1]} {backend} {recipe}"
    for seq, width in ((32, 256), (128, 256)):  # blocks of 32 tokens per device, or of 128 where a recipe needs them
        args = operands((8, seq), width, width)
        results = digests(bound("qdot", recipe, backend, placement=outer), args[:2])
        if "refused" not in results:
            break
    yield f"{case} qdot", results
    if with_mlp:
        fn = bound("mlp", recipe, backend, placements={"gate": outer, "up": outer, "down": inner})
        yield f"{case} mlp", digests(fn, args)


def command():
    for recipe in ("nvfp4", "bf16"):
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, "-m", "halfbyte", *TRAIN, "--recipe", recipe, "--run-dir", f"{folder}/run"]
            env = os.environ | {"XLA_FLAGS": "", "HALFBYTE_CACHE": folder}
            run(words, check=True, stdout=DEVNULL, env=env)
            rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        yield f"command {recipe}", {f"loss {row['step']}": row["loss"] for row in rows if "loss" in row}


PARTS = {"eager": eager, "compiled": lambda: [*jitted(), *on_meshes(), *command()]}  # as long as each other


def in_processes():
    """Returns the digests of both parts, each in a process with eight CPU devices and few LLVM passes."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "32", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    env |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}  # NPROC: tests/conftest.py has the reason
    processes = [Popen([sys.executable, __file__, "--part", part], stdout=PIPE, env=env) for part in PARTS]
    outputs = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), "a part failed"
    return {case: value for output in outputs for case, value in json.loads(output).items()}


def differences(old, new):
    """Returns case -> the line about it, for each case that differs or that only one side has."""
    lines = {case: f"only in {'new' if case in new else 'old'}: {case}" for case in old.keys() ^ new.keys()}
    for case in (each for each in old.keys() & new.keys() if old[each] != new[each]):
        a, b = old[case], new[case]
        lines[case] = f"differs: {case}: {', '.join(sorted(name for name in a | b if a.get(name) != b.get(name)))}"
    return dict(sorted(lines.items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default="digests.json")
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--removed", default="", help="recipes that were removed on purpose: NAME,NAME")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(dict(PARTS[args.part]())))
        return 0
    new = {"facts": {"jax": jax.__version__, "cpu": os.uname().machine}, "digests": in_processes()}
    if not args.compare:
        args.out.write_text(json.dumps(new, indent=0, sort_keys=True) + "\n")
        return 0
    old = json.loads(args.compare.read_text())
    lines, removed = differences(old["digests"], new["digests"]), set(args.removed.split(","))
    wrong = [case for case in lines if case in new["digests"] or not removed & set(case.split())]
    print(*lines.values(), f"recorded on {old['facts']}, run on {new['facts']}", sep="\n")
    print(f"{len(new['digests'])} cases, {len(wrong)} differences, {len(lines) - len(wrong)} of removed recipes")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
