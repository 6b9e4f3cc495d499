"""Runs `halfbyte train` in real processes: one, or several that find each other, killed when a step is reached."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from halfbyte.checkpoint import Checkpoints
from halfbyte.metrics import read_rows
from halfbyte.train import jsonconfig

SOURCE = Path(__file__).resolve().parents[2] / "src"
# Garbage is looked for less often, as in conftest.py: a start is mostly tracing.
START = "import gc; gc.set_threshold(50_000, 20, 100); from halfbyte.cli.main import entry; entry()"


class Runner:
    """A config on disk, and processes that train it."""

    def __init__(self, folder: Path, config, cache: Path):
        self.folder, self.cache = folder, cache
        folder.mkdir(exist_ok=True)
        self.config_file = folder / "config-in.json"
        jsonconfig.save(config, self.config_file)
        self.steps = config.steps

    def start(self, directory: Path, *flags: str, process=0, processes=1, port=0, devices=1) -> subprocess.Popen:
        """One process of a run in `directory`."""
        command = [sys.executable, "-c", START, "train", "--config", str(self.config_file), "--run-dir", str(directory)]
        command += ["--compile-cache", str(self.cache), "--distributed.cpu-devices", str(devices), *flags]
        if processes > 1:
            command += ["--distributed.coordinator", f"127.0.0.1:{port}", "--distributed.processes", str(processes)]
            command += ["--distributed.process", str(process), "--distributed.initialization-timeout-s", "600"]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{SOURCE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        }
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def start_all(self, directory: Path, *flags: str, processes=1, devices=1) -> list[subprocess.Popen]:
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
        for process in started if number == signal.SIGKILL else started[-1:]:
            process.send_signal(number)
        return finish(started)


def finish(started: list[subprocess.Popen]) -> tuple[int, str]:
    """Wait for all; the code and the output of the first."""
    outputs = [process.communicate(timeout=1800)[0] for process in started]
    return started[0].returncode, outputs[0]


def wait_for_step(directory: Path, step: int, started: list[subprocess.Popen]) -> None:
    log = directory / "metrics.jsonl"
    for _ in range(180_000):
        if log.exists() and log.read_text().count("\n") >= step:
            return
        if started[0].poll() is not None:
            raise AssertionError(f"ended before step {step}:\n{started[0].communicate()[0]}")
        time.sleep(0.01)
    raise AssertionError(f"step {step} was never reached")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
