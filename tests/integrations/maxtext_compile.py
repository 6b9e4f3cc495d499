"""Processor seconds in which MaxText traces and compiles its train step, for bf16 and te_nvfp4 in turn: JSON.

    python3 tests/integrations/maxtext_compile.py [REPETITIONS]

Each value is that of a process of its own, without a compile cache. `traces`: how often the step was traced, its first
call included.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

from maxtext_matrix import TINY

QUANTIZATIONS = ("", "te_nvfp4")


def measure(quantization, folder):
    """Prints the processor seconds and the number of traces of one run in this process."""
    from maxtext.trainers.pre_train import train

    from halfbyte.integrations import maxtext

    maxtext.install()
    times, traces, train_step = [], [], train.train_step

    def counted(*arguments, **rng):
        traces.append(None)
        return train_step(*arguments, **rng)

    def noted(fn):
        def call(*arguments, **named):
            times.append(time.process_time())
            return fn(*arguments, **named)

        return call

    train.train_step = counted
    train.maxtext_utils.maybe_dump_jaxpr = noted(train.maxtext_utils.maybe_dump_jaxpr)  # called directly before
    train.max_utils.print_compiled_memory_stats = noted(train.max_utils.print_compiled_memory_stats)  # and after
    own = [f"quantization={quantization}", "steps=1", f"base_output_directory={folder}"]
    train.main(
        [
            "train",
            "src/maxtext/configs/base.yml",
            *(word for word in TINY if word.partition("=")[0] not in str(own)),
            *own,
        ]
    )
    print("COMPILE " + json.dumps({"seconds": times[1] - times[0], "traces": len(traces)}))


def main(repetitions):
    environment = {"JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    rows = {name or "bf16": [] for name in QUANTIZATIONS}
    for _ in range(repetitions):
        for name in QUANTIZATIONS:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, "--one", name, folder]
                done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
            (line,) = [line for line in done.stdout.splitlines() if line.startswith("COMPILE ")]
            rows[name or "bf16"].append(json.loads(line.removeprefix("COMPILE ")))
    best = {name: min(row["seconds"] for row in found) for name, found in rows.items()}
    print(json.dumps({"runs": rows, "ratio": best["te_nvfp4"] / best["bf16"]}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        measure(*sys.argv[2:])
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 3)
