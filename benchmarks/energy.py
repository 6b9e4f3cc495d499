"""What the driver's energy counter is worth: beside the sum of power samples over the same minute of training steps.

    python benchmarks/energy.py --out energy.json [--model llama3.2-1b --batch 4 --seq 4096 --seconds 60]

Idle power first, with a context on the card and nothing running; then steps, warmed up before anything is counted.
"""

import json
import pathlib
import sys
import threading
import time
from collections.abc import Callable

import jax
import tyro

from halfbyte.bench import compile_step
from halfbyte.bench.timing import synthetic_batch
from halfbyte.cli import bench as command
from halfbyte.devices import Energy, energy
from halfbyte.train import create_state, run_mesh

BETWEEN = 0.05  # seconds between samples


class Sampled(threading.Thread):
    """Joules by summed samples of power, each counted for the time until the next."""

    def __init__(self, counted: Energy):
        super().__init__(daemon=True)
        self.counted, self.ended, self.joules, self.samples = counted, threading.Event(), 0.0, 0

    def run(self) -> None:
        last, watts = time.perf_counter(), self.counted.watts() or 0.0
        while not self.ended.wait(BETWEEN):
            now = time.perf_counter()
            self.joules += watts * (now - last)
            last, watts, self.samples = now, self.counted.watts() or 0.0, self.samples + 1
        self.joules += watts * (time.perf_counter() - last)


def over(counted: Energy, work: Callable[[], object]) -> dict[str, float]:
    """Seconds of `work`, and its joules by the counter and by samples."""
    sampled, start, before = Sampled(counted), time.perf_counter(), counted.joules() or 0.0
    sampled.start()
    work()
    spent = time.perf_counter() - start
    sampled.ended.set()
    sampled.join()
    drawn = (counted.joules() or 0.0) - before
    return {"seconds": spent, "counter_joules": drawn, "sampled_joules": sampled.joules, "samples": sampled.samples,
            "sampled_over_counter": sampled.joules / drawn, "watts": drawn / spent}  # fmt: skip


def steps(model: str, batch: int, seq: int) -> Callable[[float], None]:
    """A function that runs steps for some seconds."""
    config = command.config_of(command.Args(model, policy="mlp", batch=batch, seq=seq, unroll=1), "bf16", "none")
    mesh = run_mesh(config)
    program, rows = compile_step(config, mesh, seq=seq), synthetic_batch(config, mesh, seq)
    held = [create_state(config, mesh)]

    def run(seconds: float) -> None:
        stop = time.perf_counter() + seconds
        while time.perf_counter() < stop:
            held[0], metrics = program(held[0], rows)
            jax.block_until_ready(metrics)

    return run


def main(out: pathlib.Path, model: str = "llama3.2-1b", batch: int = 4, seq: int = 4096, seconds: float = 60.0) -> int:
    counted = energy(jax.local_devices())
    if counted.missing:
        print(f"nothing to compare: {counted.missing}")
        return 2
    jax.block_until_ready(jax.numpy.ones(8) + 1)
    idle = over(counted, lambda: time.sleep(5))
    run = steps(model, batch, seq)
    run(3.0)
    found = {"environment": command.versions(), "idle": idle, "steps": over(counted, lambda: run(seconds))}
    out.write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))
    return 0 if abs(found["steps"]["sampled_over_counter"] - 1) < 0.05 else 3


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
