"""Runs `halfbyte train` in real processes: one, or several that find each other, killed when a step is reached."""

import json
import signal
import subprocess
from pathlib import Path

from outside import ENTRY, Started, Warm, environment, free_port, wait_until

from halfbyte.checkpoint import Checkpoints
from halfbyte.metrics import read_rows
from halfbyte.train import jsonconfig


class Runner:
    """A config on disk, and processes that train it, forked by `warm` if it is there."""

    def __init__(self, folder: Path, config, cache: Path, warm: Warm | None):
        self.folder, self.cache, self.warm, self.started = folder, cache, warm, 0
        self.environ: dict[str, str] = {}  # beside that of every process
        folder.mkdir(exist_ok=True)
        self.config_file = folder / "config-in.json"
        jsonconfig.save(config, self.config_file)
        self.steps = config.steps

    def start(self, directory: Path, *flags: str, process=0, processes=1, port=0, devices=1) -> Started:
        """One process of a run in `directory`."""
        words = ["train", "--config", str(self.config_file), "--run-dir", str(directory)]
        words += ["--compile-cache", str(self.cache), "--distributed.cpu-devices", str(devices), *flags]
        if processes > 1:
            words += ["--distributed.coordinator", f"127.0.0.1:{port}", "--distributed.processes", str(processes)]
            words += ["--distributed.process", str(process), "--distributed.initialization-timeout-s", "600"]
        self.started += 1
        log = self.folder / f"output-{self.started}.txt"
        with open(log, "wb") as file:
            if self.warm is not None:
                return Started(self.warm.start({"words": words, "environ": self.environ}, file.fileno()), log)
            environ = environment() | self.environ
            cold = subprocess.Popen([*ENTRY, *words], env=environ, stdout=file, stderr=subprocess.STDOUT)
            return Started(cold, log)

    def start_all(self, directory: Path, *flags: str, processes=1, devices=1) -> list[Started]:
        """All processes of a run."""
        port = free_port()
        shape = {"processes": processes, "port": port, "devices": devices}
        return [self.start(directory, *flags, process=rank, **shape) for rank in range(processes)]

    def run(self, directory: Path, *flags: str, processes=1, devices=1) -> tuple[int, str]:
        """(exit code of process 0, its output), after all have ended."""
        return finish(self.start_all(directory, *flags, processes=processes, devices=devices))

    def killed_at(self, directory: Path, step: int, *flags: str, number=signal.SIGKILL, processes=1, devices=1):
        """Start, send every process (SIGTERM: the last one only) a signal once `step` is logged; (code, output)."""
        started = self.start_all(directory, *flags, processes=processes, devices=devices)
        wait_for_step(directory, step, started)
        for one in started if number == signal.SIGKILL else started[-1:]:
            one.process.send_signal(number)
        return finish(started)


def finish(started: list[Started]) -> tuple[int, str]:
    """Wait for all; the code and the output of the first."""
    codes = [one.wait(1800) for one in started]
    return codes[0], started[0].output


def wait_for_step(directory: Path, step: int, started: list[Started]) -> None:
    log = directory / "metrics.jsonl"
    reached = wait_until(lambda: log.exists() and log.read_text().count("\n") >= step, started[:1], 1800)
    assert reached, f"ended before step {step}:\n{started[0].output}"


def losses(directory: Path) -> list[float]:
    """Loss of every step, in order; every step exactly once."""
    rows = read_rows(directory / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def final_checksums(directory: Path) -> dict:
    """Checksums of params, optimizer and progress in the newest checkpoint."""
    store = Checkpoints(directory / "checkpoints")
    record = store.record(store.steps()[-1])
    store.close()
    return json.loads(json.dumps(record.leaves))
