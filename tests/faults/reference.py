"""The undisturbed runs that every fault is held against, and the list of faults.

A fault is a function of (bench, folder, random generator): it causes something, proves that it came, and checks what
came of it. It returns a sentence about that, and raises AssertionError when it is not what must happen.
"""

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from outside import HUNG, STACKS, Started, Trainer, Warm, last_step, wait_until
from places import Places
from states import differing, losses, saved_state

# `hard` has everything that makes resuming hard: 4 bits, stochastic rounding, accumulation, a dynamic loss scale. What
# happens to files, signals and processes does not depend on the recipe, and a start of `light` costs half as much.
# `short` is `light` in half the steps, with as many saves: for tests, which try a few faults that do not ask how long a
# run goes on. All lie on two devices, of one process or of two, with the same bits.
RUNS: dict[str, dict[str, Any]] = {
    "light": {"recipe": "bf16", "steps": 60, "every": 10, "accumulate": 1, "scaled": False},
    "short": {"recipe": "bf16", "steps": 30, "every": 5, "accumulate": 1, "scaled": False},
    "hard": {"recipe": "nvfp4", "steps": 24, "every": 4, "accumulate": 2, "scaled": True},
}


def write_config(path: Path, data: Path, run: str) -> None:
    """The config of one of RUNS."""
    from halfbyte.io import dataclass_json
    from halfbyte.models import LlamaConfig
    from halfbyte.train import (
        CheckpointConfig,
        LogConfig,
        LossScaleConfig,
        OptimizerConfig,
        TrainConfig,
        ValidationConfig,
    )

    chosen = RUNS[run]
    model = LlamaConfig(
        name="tiny", vocab_size=1024, embed=32, mlp=64, layers=2, heads=4, kv_heads=2, head_dim=16, max_seq=64
    )
    config = TrainConfig(
        name="faults",
        model=model,
        recipe=chosen["recipe"],
        mesh="fsdp=2",
        data=str(data),
        steps=chosen["steps"],
        batch=8,
        accumulate=chosen["accumulate"],
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup=1),
        loss_scale=LossScaleConfig(mode="dynamic" if chosen["scaled"] else "off", initial=8.0, growth_interval=8),
        validation=ValidationConfig(at_end=False, batches=1),
        checkpoint=CheckpointConfig(every=chosen["every"], keep_last=3),
        log=LogConfig(tensorboard=False, every=chosen["steps"]),
    )
    dataclass_json.save_config(config, path)


@dataclass
class Bench:
    """A trainer and `whole`, its undisturbed run of so many `steps`, with a checkpoint `every` so many and so many
    `operations` that make, move or remove a file."""

    trainer: Trainer
    whole: Path
    steps: int
    every: int
    operations: int
    data: Path
    places: Places

    @functools.cached_property
    def reference(self) -> tuple[list[float], tuple[int, dict[str, str]]]:
        """Losses and arrays of the undisturbed run."""
        return losses(self.whole), saved_state(self.whole)

    def same_arrays(self, folder: Path, *, rows: bool = True) -> None:
        """The run's last checkpoint has the bytes of the undisturbed one's in every array, and `verify` finds all that
        the run has written whole; of the `rows` of its metrics some may be missing where a disk refused them."""
        step, found = saved_state(folder)
        assert step == self.reference[1][0], f"the last checkpoint is of step {step}"
        assert found == self.reference[1][1], differing(found, self.reference[1][1])
        code, one = self.verify(folder)
        bad = [line for line in one.output.splitlines() if "NOT WHOLE" in line and (rows or "metrics" not in line)]
        assert code == (3 if "NOT WHOLE" in one.output else 0) and not bad, f"verify: {code}: {one.said[-800:]}"

    def same_end(self, folder: Path) -> None:
        """The run in `folder` ended as the undisturbed one did, bit for bit, in every loss and every array."""
        assert losses(folder) == self.reference[0], "losses differ from the undisturbed run"
        self.same_arrays(folder)

    def verify(self, folder: Path) -> tuple[int, Started]:
        """`halfbyte verify`: exit code and process; it must have ended by itself, with a sentence."""
        code, one = self.trainer.run(f"{folder.name}-verify", "verify", str(folder))
        assert code != HUNG, f"verify hung: {one.said[-400:]}"
        is_sentence(one.output)
        return code, one

    def goes_on(self, folder: Path, *flags: str, ranks: int = 1) -> str:
        """Start again, run to the end, compare; the output."""
        code, output = self.trainer.finish(folder, *flags, ranks=ranks)
        assert code == 0, f"ended with {code}: {output[-800:]}"
        self.same_end(folder)
        return output


@dataclass
class Benches:
    """The bench of each run, made when the first fault asks for it."""

    root: Path
    warm: Warm
    cache: Path
    places: Places = field(default_factory=Places)
    made: dict[str, Bench] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, run: str) -> Bench:
        with self.lock:
            if run not in self.made:
                self.made[run] = self._make(run)
            return self.made[run]

    def _make(self, run: str) -> Bench:
        logs, config = self.root / "logs", self.root / f"{run}.json"
        logs.mkdir(exist_ok=True)
        write_config(config, self.data, run)
        trainer = Trainer(config, self.cache, logs, self.warm)
        folder, log = self.root / run, self.root / f"{run}.operations"
        one = trainer.start(folder, under=folder, log=log)
        if code := one.wait():
            raise SystemExit(f"the undisturbed run ended with {code}:\n{one.output[-3000:]}")
        operations = sum(line.startswith("change") for line in log.read_text().splitlines())
        return Bench(trainer, folder, RUNS[run]["steps"], RUNS[run]["every"], operations, self.data, self.places)

    @functools.cached_property
    def data(self) -> Path:
        """A small data set with a tokenizer."""
        from halfbyte.data import demo_dataset

        return Path(demo_dataset(self.root / "data", seq_len=32).directory)


Fault = Callable[[Bench, Path, Random], str]


class Kind(NamedTuple):
    """A fault, how often a full run tries it, how many cores it keeps busy, which run it disturbs, and whether it needs
    the right to mount."""

    fault: Fault
    times: int
    cores: int
    run: str
    mounts: bool


KINDS: dict[str, Kind] = {}


def kind(times: int, *, cores: int = 1, run: str = "light", mounts: bool = False) -> Callable[[Fault], Fault]:
    """Register a fault under its function's name. Two ranks that train wait for each other in every collective: beside
    another process each of their steps takes ten times as long, so they are given two cores."""

    def register(fault: Fault) -> Fault:
        KINDS[fault.__name__] = Kind(fault, times, cores, run, mounts)
        return fault

    return register


def at_random_step(bench: Bench, folder: Path, started: list[Started], random: Random) -> int:
    """Wait for a step in the first half of the run, and a little longer."""
    step = random.randint(bench.every // 2, bench.steps // 2)
    assert wait_until(lambda: last_step(folder) >= step, started), f"step {step} never came: {started[0].output[-800:]}"
    time.sleep(random.random() * 0.05)
    return step


def is_sentence(output: str) -> None:
    """No page of C++ stack, no Python traceback."""
    assert not STACKS.search(output), "a C++ stack"
    assert "Traceback (most recent call last)" not in output, f"a traceback: {output[-400:]}"


def refused(one: Started, code: int, *words: str, expect: int = 2) -> None:
    """It ended with bad input's code and a sentence that has each of `words`."""
    assert code == expect, f"ended with {code}, not {expect}: {one.said[-600:]}"
    is_sentence(one.output)
    said = one.output.replace("\n", "").replace(" ", "")
    missing = [word for word in words if word.replace(" ", "") not in said]
    assert not missing, f"does not say {missing}: {one.said[-600:]}"
