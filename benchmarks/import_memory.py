"""Memory of an import: the most that reading a sharded folder into parameters takes, beside the parameters themselves.

    python benchmarks/import_memory.py                      a random Llama of 0.36 GB in four bf16 shards
    python benchmarks/import_memory.py --folder HF_DIR      a model of yours
    python benchmarks/import_memory.py --run                `halfbyte import`, and then the run it made is opened

Prints the peak of the process's resident memory above what it held before the import, the destination (float32
parameters), the largest shard, and (peak - destination) / largest shard, which must be at most 1.2.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from halfbyte.devices.platform import settle_platform

settle_platform(os.environ)


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The most resident memory seen while it runs, looked at every millisecond."""

    def __enter__(self) -> "Peak":
        self.most, self._running = resident(), True
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while self._running:
            self.most = max(self.most, resident())
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self._running = False
        self._thread.join()


def write_random(folder: Path) -> None:
    """A random model in four shards, written by a process of its own so that nothing of it stays in this one."""
    code = f"""
import jax.numpy as jnp, numpy as np
from pathlib import Path
from halfbyte import models
from halfbyte.interchange.hf_config import config_to_hf
from halfbyte.interchange.hf_names import sites
from halfbyte.interchange.layouts import Part
from halfbyte.interchange.tensor_file import Planned
from halfbyte.interchange.writing import write_folder
cfg = models.preset("llama-350m").replace(vocab_size=8192, layers=12)
bf16, random = np.dtype(jnp.bfloat16), np.random.default_rng(0)
def part(site):
    make = lambda: (random.standard_normal(site.shape, np.float32).astype(bf16),)
    return Part((Planned(site.name, bf16, site.shape),), make)
parts = [part(site) for site in sites(cfg)]
write_folder(Path({str(folder)!r}), parts, config_to_hf(cfg), {{}}, shard_bytes=sum(p.nbytes for p in parts) // 4 + 1)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def measure(folder: Path, *, whole_run: bool, scratch: Path) -> dict[str, float]:
    import jax
    import jax.numpy as jnp

    from halfbyte import models
    from halfbyte.interchange import Folder, config_from_hf, import_folder, load_params
    from halfbyte.interchange.opening import restore_params
    from halfbyte.sharding import DEFAULT_RULES

    jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.zeros(8)))  # the runtime's own memory is there before
    with Folder(folder) as opened:
        config = config_from_hf(opened.config, "model")
        largest = max(path.stat().st_size for path in opened.shards())
        before, began = resident(), time.perf_counter()
        with Peak() as peak:
            if whole_run:
                run = import_folder(folder, scratch / "run")
                jax.block_until_ready(restore_params(scratch / "run", run, mesh=None, rules=DEFAULT_RULES, step=None))
            else:
                jax.block_until_ready(load_params(opened, config))
    destination = 4 * models.count_params(config)
    return {
        "seconds": time.perf_counter() - began,
        "destination_gb": destination / 1e9,
        "largest_shard_gb": largest / 1e9,
        "peak_gb": (peak.most - before) / 1e9,
        "beside_destination_over_shard": (peak.most - before - destination) / largest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--run", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch) / "model"
        if args.folder is None:
            write_random(folder)
        found = measure(folder, whole_run=args.run, scratch=Path(scratch))
    import jax

    found |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "python": platform.python_version()}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
