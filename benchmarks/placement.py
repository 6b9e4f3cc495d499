"""How the trainer's own step is placed on a mesh that need not be here: FLOPs, bytes, memory and overlap of a device.

Compiles for the named GPUs without one (extra `plan`) and reads the program. One line a mesh:

    python benchmarks/placement.py llama3.1-405b --device gb300 --hosts 32 --per-host 4 --batch 128 --mesh fsdp=128
"""

import argparse
import dataclasses
import json
import os
import time

os.environ["JAX_PLATFORMS"] = "cpu"

from halfbyte.launch.xla_flags import EVERY_GPU, as_known


def main() -> None:
    args = arguments()
    flags = [setting.assignment for setting in as_known(EVERY_GPU)] if args.flags == "recommended" else []
    flags += [] if args.flags in ("recommended", "none") else args.flags.split()
    if flags:
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
    for mesh in args.mesh:
        print(json.dumps(row(args, mesh)), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="gb300")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--per-host", type=int, default=8)
    parser.add_argument("--mesh", nargs="+", required=True)
    parser.add_argument("--batch", type=int, default=0, help="sequences of a step; 0: one a device")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=4, help="figures scale with layers; 0: all")
    parser.add_argument("--unroll", type=int, default=1, help="layers a loop iteration; 0: all")
    parser.add_argument("--recipe", default="nvfp4")
    parser.add_argument("--policy", default="mlp")
    parser.add_argument("--remat", default="")
    parser.add_argument("--flags", default="recommended", help="recommended, none, or XLA flags")
    parser.add_argument("--text", default="", help="write the program's text here")
    parser.add_argument("--collectives", action="store_true", help="list each collective with the GEMMs beside it")
    return parser.parse_args()


def row(args: argparse.Namespace, mesh_text: str) -> dict[str, object]:
    import jax
    import numpy as np

    from halfbyte import bench, devices, ops, program
    from halfbyte.runs import run_config
    from halfbyte.train import run_mesh

    device = devices.device(args.device)
    preset = run_config(args.model)
    model = dataclasses.replace(preset.model, layers=args.layers or preset.model.layers)
    batch = args.batch or args.hosts * args.per_host
    config = dataclasses.replace(
        preset, model=model, recipe=args.recipe, policy=args.policy, remat=args.remat or preset.remat, mesh=mesh_text,
        batch=batch, seq=args.seq, accumulate=1, unroll=args.unroll, data="synthetic",
    )  # fmt: skip
    mesh = run_mesh(config, np.array(devices.topology(device, hosts=args.hosts, per_host=args.per_host).devices))
    started = time.perf_counter()
    with ops.compile_for(device), devices.target_cudnn():
        compiled = bench.compile_step(config, mesh, seq=args.seq)
    seconds = time.perf_counter() - started
    text = compiled.as_text()
    if args.text:
        with open(args.text, "w", encoding="utf-8") as file:
            file.write(text)
    found, read = bench.placement(compiled, config, mesh), program.read(text)
    if args.collectives:
        for each in program.overlap(read, dict(mesh.shape)):
            print(f"  {each.collective}: {len(each.gemms)} GEMMs, {each.flops / 1e12:.2f} TFLOP between", flush=True)
    return {
        "model": args.model, "layers": model.layers, "recipe": args.recipe, "device": device.name, "mesh": mesh_text,
        "batch": batch, "excess": round(found.excess, 4), "needed_tflop": round(found.needed_flops / 1e12, 2),
        "gib": round(found.bytes_needed / 2**30, 1), "of_gib": round((device.memory_bytes or 0) / 2**30, 1),
        "gathered_gb": {dtype: round(size / 1e9, 3) for dtype, size in found.gathered.items()},
        "wide_gathers": len(found.wide_gathers), "whole_reduces": len(found.whole_reduces),
        "hidden": round(bench.hidden(read, dict(mesh.shape), device), 3),
        "hidden_time": round(bench.hidden_time(read, dict(mesh.shape), device), 3),
        "traffic_gb": {name: round(each.total / 1e9, 1) for name, each in program.traffic(read).items()},
        "compile_s": round(seconds, 1), "jax": jax.__version__,
    }  # fmt: skip


if __name__ == "__main__":
    main()
