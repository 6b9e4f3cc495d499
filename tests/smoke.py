"""Smoke test of an installed Halfbyte: import, doctor, train, generate, parity, plan and export, at tiny sizes.

    python tests/smoke.py [--python PYTHON] [--limit SECONDS]

PYTHON (default: the one that runs this script) must have `halfbyte` installed, from a wheel for instance; the extra
`plan` makes `plan` compile for a GPU. Each step runs in a process of its own, in a temporary folder, without
PYTHONPATH, and prints one line. Exit code 1 if a step fails or a command takes longer than the limit. The upper bound
of `jax` in pyproject.toml is the newest series on which this passes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

RUN = "run"
TINY = "--model.layers 1 --batch 2 --seq 64 --validation.batches 1".split()
# Imports every module but those of extras that are not installed. A deprecation that our code causes is an error.
IMPORT = """
import importlib, pkgutil, sys, warnings
warnings.filterwarnings("error", category=DeprecationWarning, module=r"halfbyte\\b")
import halfbyte, jax
names, skipped = [m.name for m in pkgutil.walk_packages(halfbyte.__path__, "halfbyte.")], []
for name in names:
    if name == "halfbyte.__main__":
        continue
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("halfbyte", "jax", "jaxlib"):
            raise
        skipped.append(error.name)
print(f"{len(names)} modules of halfbyte {halfbyte.__version__} on JAX {jax.__version__}, Python "
      f"{sys.version.split()[0]}" + (f", without {', '.join(sorted(set(skipped)))}" if skipped else ""))
"""


class SmokeFailure(Exception):
    """A step whose exit code or output is not the expected one."""


class Steps:
    """Runs commands of one installation in one folder."""

    def __init__(self, python: str, folder: Path, limit: float):
        self.python, self.folder, self.limit = python, folder, limit
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
        self.environ = {**kept, "HALFBYTE_CACHE": str(folder / "cache")}

    def python_run(self, *arguments: str, codes: tuple[int, ...] = (0,)) -> str:
        """Returns stdout of `python ARGUMENTS`. Raises SmokeFailure for another exit code or after the limit."""
        command = [self.python, *arguments]
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=self.environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=self.limit, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            raise SmokeFailure(f"not done after {self.limit:.0f} s") from late
        if done.returncode not in codes:
            raise SmokeFailure(f"exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return done.stdout

    def halfbyte(self, *arguments: str, codes: tuple[int, ...] = (0,)) -> str:
        return self.python_run("-m", "halfbyte", *arguments, codes=codes)

    def imports(self) -> str:
        return self.python_run("-c", IMPORT).strip()

    def doctor(self) -> str:
        report = json.loads(self.halfbyte("doctor", "--json"))
        expect(report["passed"], report)
        return f"{len(report['devices'])} device kind, quantizers pass"

    def train(self) -> str:
        self.halfbyte("train", "demo", "--steps", "3", *TINY, "--run-dir", RUN, "--no-sample")
        rows = [json.loads(line) for line in (self.folder / RUN / "metrics.jsonl").read_text().splitlines()]
        losses = [row["loss"] for row in rows if "loss" in row]
        expect(losses and all(0 < loss < 20 for loss in losses), rows)
        return f"loss {losses[-1]:.3f}"

    def generate(self) -> str:
        text = self.halfbyte("generate", RUN, "--prompt", "The", "--max-tokens", "8")
        expect(text.startswith("The") and len(text) > len("The\n"), text)
        return repr(text.strip()[:40])

    def parity(self) -> str:
        """Without control arms nothing passes, so the expected exit code is 3."""
        config = str(self.folder / RUN / "config.json")
        sizes = "--steps 3 --seeds 3 --candidates nvfp4 --no-controls --radar -1 --out study".split()
        self.halfbyte("parity", config, *sizes, codes=(3,))
        report = json.loads((self.folder / "study" / "report.json").read_text())
        expect("nvfp4" in json.dumps(report), report)
        return "3 seeds of 2 arms"

    def plan(self) -> str:
        cluster = "--device b200 --count 1 --recipe bf16 --layers 1 --json".split()
        (row,) = json.loads(self.halfbyte("plan", "demo", *cluster))["recipes"].values()
        has_plugin = self.python_run("-c", FIND_PLUGIN).strip() == "True"
        expect(row["fits"] and row["compiled"] == has_plugin, row)
        return "compiled for b200" if row["compiled"] else "analytic: the extra `plan` is not installed"

    def export(self) -> str:
        for name in ("hf", "compressed-tensors"):
            self.halfbyte("export", RUN, "--format", name, "--out", name)
            expect(list((self.folder / name).glob("*.safetensors")), name)
        return "hf, compressed-tensors"

    def all(self) -> Iterator[tuple[str, Callable[[], str]]]:
        yield from (("import", self.imports), ("doctor", self.doctor), ("train", self.train))
        yield from (("generate", self.generate), ("parity", self.parity))
        yield from (("plan", self.plan), ("export", self.export))


FIND_PLUGIN = "import importlib.util as u; print(any(map(u.find_spec, ('jax_cuda12_plugin', 'jax_cuda13_plugin'))))"


def expect(condition: object, shown: object) -> None:
    if not condition:
        raise SmokeFailure(f"unexpected output: {str(shown)[:2000]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="a Python with halfbyte installed")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for each command (240)")
    args = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="halfbyte-smoke-") as folder:
        for name, step in Steps(str(Path(args.python).absolute()), Path(folder), args.limit).all():
            begun = time.monotonic()
            try:
                outcome, words = "ok", step()
            except SmokeFailure as failure:
                outcome, words, failed = "FAILED", str(failure), failed + 1
            print(f"{outcome:<6} {name:<9} {time.monotonic() - begun:5.0f} s  {words}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
