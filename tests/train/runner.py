"""Runs `halfbyte train` in real processes: one, or several that find each other, held where signals shall find them."""

import json
from pathlib import Path

from outside import Gate, Started, Warm, free_port

from halfbyte.checkpoint import CheckpointManager
from halfbyte.io import dataclass_json
from halfbyte.train import read_rows


class Runner:
    """A config on disk, and processes that train it, forked by `warm`."""

    def __init__(self, folder: Path, config, cache: Path, warm: Warm):
        self.folder, self.cache, self.warm, self.started = folder, cache, warm, 0
        self.environ: dict[str, str] = {}  # beside that of every process
        folder.mkdir(exist_ok=True)
        self.config_file = folder / "config-in.json"
        dataclass_json.save_config(config, self.config_file)
        self.steps = config.steps

    def start(self, directory, *flags: str, process=0, processes=1, port=0, devices=1, gate: Gate | None = None):
        """One process of a run in `directory`; it waits at the gate, if there is one."""
        words = ["train", "--config", str(self.config_file), "--run-dir", str(directory)]
        words += ["--compile-cache", str(self.cache), "--distributed.cpu-devices", str(devices), *flags]
        if processes > 1:
            words += ["--distributed.coordinator", f"127.0.0.1:{port}", "--distributed.processes", str(processes)]
            words += ["--distributed.process", str(process), "--distributed.initialization-timeout-s", "600"]
        self.started += 1
        log = self.folder / f"output-{self.started}.txt"
        request = {"words": words, "environ": self.environ, **(gate.request if gate else {})}
        with open(log, "wb") as file:
            return Started(self.warm.start(request, file.fileno()), log)

    def start_all(self, directory: Path, *flags: str, processes=1, devices=1) -> list[Started]:
        """All processes of a run."""
        port = free_port()
        shape = {"processes": processes, "port": port, "devices": devices}
        return [self.start(directory, *flags, process=rank, **shape) for rank in range(processes)]

    def run(self, directory: Path, *flags: str, processes=1, devices=1) -> tuple[int, str]:
        """(exit code of process 0, its output), after all have ended."""
        return finish(self.start_all(directory, *flags, processes=processes, devices=devices))


def finish(started: list[Started]) -> tuple[int, str]:
    """Wait for all; the code and the output of the first."""
    codes = [one.wait(1800) for one in started]
    return codes[0], started[0].output


def losses(directory: Path) -> list[float]:
    """Loss of every step, in order; every step exactly once."""
    rows = read_rows(directory / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def final_checksums(directory: Path) -> dict:
    """Checksums of params, optimizer and progress in the newest checkpoint."""
    store = CheckpointManager(directory / "checkpoints")
    record = store.record(store.steps()[-1])
    store.close()
    return json.loads(json.dumps(record.leaves))
