"""The bits of the linears, as hashes: a change that should change none is run before and after.

    python bits.py --out before.json                      # at the old commit, with its copy of this file
    python tests/ops/bits.py --out after.json --compare before.json

It names what lies inside the package, which other commits have elsewhere: the old side runs the file as that commit
has it, or a copy whose imports were made to fit.

Value and gradients of `qdot` and of `mlp` for every preset, by every backend that serves, on several meshes of CPU
devices; kernels interpreted on a CPU and compiled on a GPU; and the losses of six steps. `--programs` hashes what is
lowered instead of what is computed: sooner done, and equal programs have equal bits. `--jobs 14` on many cores.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

os.environ.setdefault("NPROC", "32")  # eight CPU devices wait for each other in collectives

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import halfbyte as hb
from halfbyte import devices, kernels, ops
from halfbyte.distributed import make_mesh
from halfbyte.kernels.mosaic_launch import empty_stack_buffer, return_as_cotangent
from halfbyte.models import LlamaConfig
from halfbyte.ops import gemm_problem
from halfbyte.ops.backends import BACKENDS, native
from halfbyte.ops.gemm_problem import apply_epilogue, dot_f32
from halfbyte.train import TrainConfig, create_state, jit_train_step, phases, run_mesh

SITES = ("gate", "up", "down")
MESHES = {"fsdp=8": (8, 1), "fsdp=4,tensor=2": (4, 2), "tensor=8": (1, 8)}
SPECS = {  # of x, W and y: outputs cut over tensor on the way in, inputs on the way out
    "in": (P("fsdp", "tensor"), P("fsdp", "tensor"), P("fsdp", None, "tensor")),
    "out": (P("fsdp", None, "tensor"), P("tensor", "fsdp"), P("fsdp", "tensor")),
}
quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
MODEL = LlamaConfig("bits", vocab_size=64, embed=128, mlp=256, layers=2, heads=4, kv_heads=2, head_dim=32, max_seq=64)


def arrays(width, hidden, seq=16):
    """x of a batch of 8, gate, up and down."""
    rng = np.random.default_rng(4)
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    weights = (rng.normal(size=s).astype(np.float32) / np.sqrt(s[0]) for s in shapes)
    return jnp.asarray(rng.normal(size=(8, seq, width)), jnp.bfloat16), *map(jnp.asarray, weights)


def gradients(fn):
    return jax.value_and_grad(lambda *a: jnp.sum(fn(*a).astype(jnp.float32) ** 2), (0, 1, 2, 3))


def placement(mesh, kind):
    return ops.Placement(mesh, *SPECS[kind])


def of_linears(mesh, options, x, gate, up, down):
    """Two linears, y = (x gate) down, so that every kind of placement is seen; the third weight has no gradient."""
    places = [None, None] if mesh is None else [placement(mesh, kind) for kind in ("in", "out")]
    h = hb.qdot(x, gate, placement=places[0], **options)
    return hb.qdot(h, down, placement=places[1], **options)


def of_mlp(mesh, options, mode, x, *weights):
    places = None if mesh is None else dict(zip(SITES, (placement(mesh, k) for k in ("in", "in", "out")), strict=True))
    return hb.mlp(x, *weights, placements=places, residuals=mode, **options)


def of_stacks(mesh, options, x, *weights):
    """One MLP whose products lie in the second layer of stacks of three."""
    stacks = tuple(empty_stack_buffer(3, (*x.shape[:-1], weights[0].shape[-1]), x.dtype) for _ in range(2))
    given = {"recipe": options["recipe"], "key": options["key"], "execution": ops.ExecutionConfig(options["backend"])}
    y, place = ops.mlp_with_stacked_residuals(x, weights, (*stacks, jnp.int32(1)), **given)
    return return_as_cotangent(y, place[:2])


OPS = {
    "qdot": of_linears,
    "mlp": lambda mesh, options, *a: of_mlp(mesh, options, "operands", *a),
    "mlp input": lambda mesh, options, *a: of_mlp(mesh, options, "input", *a),
    "mlp in stacks": of_stacks,
}


def cases(names, recipe, backend, mesh=None):
    options = {"recipe": hb.recipe(recipe), "key": jax.random.key(7), "backend": backend}
    return {name: gradients(functools.partial(OPS[name], mesh, options)) for name in names}


def on_cpu(add):
    """Every preset by definition, on one device; by carrier on one and on each mesh, if its blocks are 32 or less."""
    with ops.compile_for(devices.device_by_name("cpu")), jax.default_device(jax.devices("cpu")[0]):
        for recipe in hb.recipe_names():
            wide = any(policy.quantization_group_size > 32 for policy in hb.recipe(recipe).operands().values())
            given = arrays(128, 128) if wide else arrays(64, 128)
            add(f"cpu/reference/1/{recipe}", cases(("qdot",), recipe, "reference"), given)
            if wide:
                continue
            add(f"cpu/carrier/1/{recipe}", cases(("qdot", "mlp", "mlp input"), recipe, "emulated"), given)
            for name, shape in MESHES.items():
                mesh = make_mesh(dict(zip(("fsdp", "tensor"), shape, strict=True)), jax.devices("cpu")[:8])
                seen = ("qdot", "mlp") if 1 not in shape else ("mlp",)
                # whole blocks of 32 on each of eight devices
                add(f"cpu/carrier/{name}/{recipe}", cases(seen, recipe, "emulated", mesh), arrays(256, 256, 32))


@contextlib.contextmanager
def interpreted(device):
    """Choices are made for `device`, and its kernels run here: cuDNN's call is a product of decoded numbers."""

    def as_numbers(left, right, scale, dtype):
        a, b = (_rows(operand) for operand in (left, right))
        return apply_epilogue(dot_f32(a, b, ((1,), (1,))), scale, dtype).reshape(*left.rows, *right.rows)

    by_carrier = dataclasses.replace(BACKENDS["fused"], unsupported=lambda problem, gemm: "a GPU's GEMM")
    with (
        kernels.interpret_kernels(),
        mock.patch.dict(BACKENDS, fused=by_carrier),
        mock.patch.object(native, "block_scaled_dot", as_numbers),
        gemm_problem._target(devices.device_by_name(device)),
    ):
        yield


def _rows(operand):
    """A block-scaled operand's numbers as float32 [rows, contraction]."""
    values = operand.values()
    flat = values.reshape(-1, values.shape[-1])  # [tokens..., features] -> [tokens, features]
    return flat if operand.axis == -1 else flat.T


def by_kernels(add):
    """The passes of every backend with kernels, interpreted; alone and on a mesh."""
    served = (("fused", "h200", ("nvfp4", "nvfp4_no_rht", "nvfp4_no_2d")), ("fp8", "h200", ("fp8",)),
               ("native", "b200", ("nvfp4", "mxfp8")))  # fmt: skip
    mesh = make_mesh({"fsdp": 4, "tensor": 2}, jax.devices("cpu")[:8])
    with jax.default_device(jax.devices("cpu")[0]):
        for backend, device, recipes in served:
            for recipe in recipes:
                with interpreted(device):
                    add(f"interpreted/{backend}/1/{recipe}", cases(list(OPS), recipe, backend), arrays(128, 256))
                    if recipe in ("nvfp4", "fp8", "mxfp8"):
                        whole = cases(("qdot", "mlp"), recipe, backend, mesh)
                        add(f"interpreted/{backend}/fsdp=4,tensor=2/{recipe}", whole, arrays(256, 512, 64))


def on_gpu(add):
    """Every preset by every backend that serves it here, at sizes that the GEMM kernel takes."""
    x, *weights = arrays(512, 1024, 128)
    for recipe in hb.recipe_names():
        for name, backend in BACKENDS.items():
            asked = ops.LinearProblem(hb.recipe(recipe), 1024, 512, 1024, ops.target_device())
            if backend.unsupported_reason(asked) is None:
                add(f"gpu/{name}/1/{recipe}", cases(list(OPS), recipe, name), (x, *weights))


def steps(add):
    """The losses of six steps of the trainer's own step."""
    runs = {"": 1, "fsdp=4,tensor=2": 8} if jax.default_backend() == "cpu" else {"": 1}
    for recipe, remat in (("nvfp4", "none"), ("nvfp4", "quantized"), ("fp8", "none"), ("bf16", "none")):
        for text, count in runs.items():
            config = TrainConfig(name="bits", model=MODEL, recipe=recipe, remat=remat, mesh=text, batch=8, seq=64)
            mesh = run_mesh(config, jax.devices()[:count])
            tokens = np.random.default_rng(1).integers(0, MODEL.vocab_size, (8, 65), dtype=np.int32)
            batch = {"tokens": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:])}
            step = jit_train_step(config, phases(config)[0].resolved(config), mesh)
            add(f"step/{text or 1}/{recipe} {remat}", {"six losses": functools.partial(_six, step)},
                (create_state(config, mesh), batch), jitted=False)  # fmt: skip


def _six(step, state, batch):
    losses = []
    for _ in range(6):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return losses


def command(found):
    """The losses of `halfbyte train` over six steps."""
    missing = [name for name in ("tyro", "grain") if importlib.util.find_spec(name) is None]
    if missing:
        found["command"] = f"not run: no {' and no '.join(missing)} here"
        return
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "halfbyte", "train", "--steps", "6", "--run-dir", f"{folder}/run", "--no-sample"]
        subprocess.run(run, check=True, capture_output=True, env=os.environ | {"COLUMNS": "100"})
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        found["command"] = [row["loss"] for row in rows if "loss" in row]


def digest(tree):
    """SHA-256 of the shapes, dtypes and bytes of a tree, begun."""
    made = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        made.update(f"{leaf.shape} {leaf.dtype}".encode() + np.asarray(leaf).tobytes())
    return made.hexdigest()[:16]


def text_digest(lowered):
    return hashlib.sha256(re.sub(r"loc\(.*?\)|#loc.*", "", lowered.as_text()).encode()).hexdigest()[:16]


def collect(options):
    found: dict[str, object] = {}
    part, parts = map(int, options.part.split("/"))
    numbers = itertools.count()

    def add(prefix, runs, args, *, jitted=True):
        for name, run in runs.items():
            case = f"{prefix}/{name}"
            if options.only not in case or next(numbers) % parts != part:
                continue
            fast = quick if prefix.startswith(("cpu", "interpreted")) else None
            compiled = jax.jit(run, compiler_options=fast) if jitted else run
            found[case] = text_digest(compiled.lower(*args)) if options.programs else digest(compiled(*args))

    on_device = (steps,) if jax.default_backend() == "cpu" else (on_gpu, steps)
    chosen = {"cpu": (on_cpu, by_kernels), "device": () if options.programs else on_device}
    for each in [each for name, group in chosen.items() if options.group in ("", name) for each in group]:
        began = time.monotonic()
        each(add)
        print(f"{each.__name__}: {len(found)} cases, {time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.group != "cpu" and options.only in "command" and not options.programs:
        command(found)
    return found


def in_processes(options):
    """`collect` by several processes: those of CPU devices, and one that has the accelerator."""
    given = [sys.executable, __file__, "--only", options.only] + ["--programs"] * options.programs
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder, f"{i}.json") for i in range(options.jobs)]
        asked = [
            ["--group", "device"],
            *(["--group", "cpu", "--part", f"{i}/{len(outs) - 1}"] for i in range(len(outs) - 1)),
        ]
        environments = [os.environ, *[os.environ | {"JAX_PLATFORMS": "cpu"}] * (len(outs) - 1)]
        ranks = [
            subprocess.Popen([*given, *args, "--out", str(out)], env=env)
            for args, out, env in zip(asked, outs, environments, strict=True)
        ]
        ended = [rank.wait() for rank in ranks]
        if any(ended):
            sys.exit("a process failed")
        return {case: value for out in outs for case, value in json.loads(out.read_text()).items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--programs", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--group", default="", choices=("", "cpu", "device"))
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    found = in_processes(options) if options.jobs > 1 else collect(options)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    if not options.compare:
        return 0
    before = json.loads(options.compare.read_text())
    before = {case: value for case, value in before.items() if options.only in case}
    wrong = sorted(case for case in before | found if before.get(case) != found.get(case))
    print(*(f"differs: {case}: {before.get(case)} -> {found.get(case)}" for case in wrong), sep="\n")
    print(f"{len(before | found) - len(wrong)} of {len(before | found)} are equal")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
