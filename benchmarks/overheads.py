"""What surviving costs, as ratios in one run: the guards of a step, and saving in the background.

    python benchmarks/overheads.py                                    # llama3.2-1b on a GPU
    python benchmarks/overheads.py --model demo --batch 4 --seq 64 --steps 20   # on a CPU, to try it

Two programs of one step, with and without guards (the sum of the weights' bits before and after, and the count of
values that are not finite), take turns on the same weights, so that a busy device slows both alike; each reports its
median. Then a checkpoint is saved and steps go on until it is written: what that takes longer than as many steps
without it (checksums, the copy off the device, and whatever the writing takes from the steps), over `--interval` steps.
Last, one look of the radar and one of the telemetry, compiled already, over the steps between two looks. Everything is
compiled side by side at the start.
Limits: guards 2%, saving 1% of 100 steps, the radar 1% at 400 steps, telemetry 2% at 100.
"""

import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tyro

from halfbyte.devices.compile_target import force_cpu_without_gpu

force_cpu_without_gpu(os.environ)

import jax  # noqa: E402

from halfbyte.checkpoint import CheckpointManager  # noqa: E402
from halfbyte.cli.bench import bench_versions  # noqa: E402
from halfbyte.evaluation.inspection import Telemetry  # noqa: E402
from halfbyte.evaluation.radar import Radar  # noqa: E402
from halfbyte.train import create_state, phases, run_mesh  # noqa: E402
from halfbyte.train.batch_source import make_global_batch, open_batch_source  # noqa: E402
from halfbyte.train.run_presets import run_config  # noqa: E402
from halfbyte.train.train_state import StepSnapshot, params_checksum  # noqa: E402
from halfbyte.train.train_step import compiler_options, make_train_step  # noqa: E402

GUARDS, SAVING = 0.02, 0.01
PLAIN = 20  # steps without a save that those with it are held against
SAVES = 2  # the second takes the first one's place
LOOKS = {"radar": (Radar, 400, 0.01), "telemetry": (Telemetry, 100, 0.02)}  # steps between looks, limit


def compiled(config, mesh, state, batch):
    """The step for this state: one without a sentinel has no guards."""
    resolved = phases(config)[0].resolved(config)
    step = jax.jit(
        make_train_step(config, resolved, mesh),
        donate_argnums=0,
        compiler_options=compiler_options(config, mesh, resolved),
    )
    return step.lower(state, batch).compile()


def seconds(step, state, batch, steps: int):
    """(state after, seconds a step) of `steps` steps in a row."""
    jax.block_until_ready(state.params)
    began = time.perf_counter()
    for _ in range(steps):
        state, values = step(state, batch)
    jax.block_until_ready((state.params, values))
    return state, (time.perf_counter() - began) / steps


def guards(programs, state, batch, *, rounds: int, steps: int) -> dict:
    """Medians with and without guards, in turns on one state."""
    times: dict[str, list[float]] = {"guarded": [], "bare": []}
    for number in range(rounds + 1):
        state, guarded_s = seconds(programs["guarded"], state, batch, steps)
        bare, bare_s = seconds(programs["bare"], dataclasses.replace(state, sentinel=None), batch, steps)
        state = dataclasses.replace(bare, sentinel=jax.jit(params_checksum)(bare.params))
        if number:
            times["guarded"].append(guarded_s)
            times["bare"].append(bare_s)
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {**medians, "overhead": medians["guarded"] / medians["bare"] - 1, "state": state}


def late_steps(step, state, batch, go_on):
    """(state, how many) steps while `go_on(count)`; a loss is read once the next step was started, as in training."""
    many, late = 0, None
    while go_on(many):
        state, values = step(state, batch)
        if late is not None:
            float(late)
        many, late = many + 1, values["loss"]
    jax.block_until_ready(state.params)
    return state, many


def saving(step, state, batch, store, *, interval: int) -> dict:
    """What checkpoints cost the loop: steps with a save under way against as many without one; the dearest counts."""
    state, _ = late_steps(step, state, batch, lambda many: many < 2)
    saves = []
    for number in range(1, SAVES + 1):
        began = time.perf_counter()
        begun = store.save(number, state.items(), extra={})
        blocked = time.perf_counter() - began
        state, many = late_steps(step, state, batch, lambda many: store.is_saving() and many < interval)
        with_save = time.perf_counter() - began
        written = store.wait() and begun
        began = time.perf_counter()
        state, _ = late_steps(step, state, batch, lambda many: many < PLAIN)
        plain = (time.perf_counter() - began) / PLAIN
        facts = {"written": written, "blocked_s": blocked, "steps_while_writing": many, "with_save_s": with_save}
        saves.append({**facts, "plain_step_s": plain, "overhead": (with_save - many * plain) / (interval * plain)})
    store.close()
    return {"saves": saves, "overhead": max(save["overhead"] for save in saves), "state": state}


def looking(observers, moment, step_s: float) -> dict:
    """Seconds of one look of each observer, and its share of the run."""
    found = {}
    for name, observer in observers.items():
        times = []
        for _ in range(3):
            began = time.perf_counter()
            observer.observe(moment)
            times.append(time.perf_counter() - began)
        look = statistics.median(times)
        found[name] = {"look_s": look, "every": observer.every, "overhead": look / (observer.every * step_s)}
    return found


def everything_compiled(config, mesh, state, batch, observers, store) -> dict:
    """The steps; the observers take a first look meanwhile, and the store takes memory for its saves."""
    moment = StepSnapshot(1, config, phases(config)[0].resolved(config), mesh, state.params, batch)
    states = {"guarded": state, "bare": dataclasses.replace(state, sentinel=None)}
    with store.warm_up(state.items()), ThreadPoolExecutor(4) as threads:
        jobs = {name: threads.submit(compiled, config, mesh, each, batch) for name, each in states.items()}
        looks = [threads.submit(observer.observe, moment) for observer in observers.values()]
        for look in looks:
            look.result()
        return {name: job.result() for name, job in jobs.items()}


def told(facts: dict, interval: int) -> bool:
    """Print every share beside its limit; whether all are within."""
    shares = {name: (found["overhead"], LOOKS[name][2]) for name, found in facts["looks"].items()}
    shares["guards and checksums"] = (facts["guards"]["overhead"], GUARDS)
    shares[f"saving once in {interval} steps"] = (facts["saving"]["overhead"], SAVING)
    for each in facts["saving"]["saves"]:
        print(
            f"a save: {100 * each['overhead']:+.2f}%, {each['blocked_s']:.2f} s blocked, "
            f"{each['steps_while_writing']} steps while it was written"
        )
    for name, (share, limit) in shares.items():
        print(f"{name}: {100 * share:+.2f}% (limit {100 * limit:.0f}%)")
    written = all(each["written"] for each in facts["saving"]["saves"])
    if not written:
        print("a save was not written: its share means nothing")
    return written and all(share <= limit for share, limit in shares.values())


@dataclasses.dataclass(frozen=True)
class Args:
    model: str = "llama3.2-1b"
    recipe: str = "nvfp4"
    batch: int = 4
    seq: int = 4096
    steps: int = 5
    """Steps of a turn."""
    rounds: int = 3
    interval: int = 100
    json: str = ""
    """Also write the result here."""


def main(args: Args) -> int:
    """Measure; 3 if a limit is passed."""
    config = dataclasses.replace(
        run_config(args.model),
        recipe=args.recipe,
        data="synthetic",
        batch=args.batch,
        seq=args.seq,
        steps=1000,
        unroll=1,  # layers in a loop: compiled in a fraction of the time, and a step takes what it took
        mesh="",
    )
    mesh = run_mesh(config, jax.devices()[:1])
    loader = open_batch_source(config).loader(mesh)
    batch = make_global_batch(next(loader), mesh, batch=config.batch)
    loader.close()
    facts = {"model": args.model, "recipe": args.recipe, "batch": args.batch, "seq": args.seq, **bench_versions()}
    with tempfile.TemporaryDirectory(prefix="halfbyte-overheads-") as folder:
        observers = {name: kind(every, Path(folder)) for name, (kind, every, _) in LOOKS.items()}
        store = CheckpointManager(Path(folder) / "checkpoints", keep_last=1)
        state = create_state(config, mesh)
        programs = everything_compiled(config, mesh, state, batch, observers, store)
        facts["guards"] = guards(programs, state, batch, rounds=args.rounds, steps=args.steps)
        state = facts["guards"].pop("state")
        facts["saving"] = saving(programs["guarded"], state, batch, store, interval=args.interval)
        state, step_s = seconds(programs["guarded"], facts["saving"].pop("state"), batch, args.steps)
        moment = StepSnapshot(1, config, phases(config)[0].resolved(config), mesh, state.params, batch)
        facts["looks"] = looking(observers, moment, step_s)
    within = told(facts, args.interval)
    print(json.dumps(facts))
    if args.json:
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if within else 3


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
