"""What scattering gradients in bfloat16 does to the loss: the demo run three times on eight devices of the CPU.

float32, bfloat16, and float32 again with other random bits (a twin): what the twins differ by is noise.

    python benchmarks/reduce_dtype.py --steps 200 --out reduce_dtype.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ARMS = {
    "float32": [],
    "bfloat16": ["--precision.reduce-dtype", "bfloat16"],
    "float32, other random bits": ["--precision.twin", "1"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--recipe", default="nvfp4")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for at, (name, flags) in enumerate(ARMS.items()):
            found[name] = losses(Path(folder) / str(at), args.recipe, args.steps, flags)
            print(f"{name:28} {found[name]}", flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps({"recipe": args.recipe, "steps": args.steps, "arms": found}, indent=1))


def losses(folder: Path, recipe: str, steps: int, flags: list[str]) -> dict[str, float]:
    """Mean training loss of the last 20 steps, and the validation loss after the last."""
    entry = "from halfbyte.cli.main import entry; entry()"
    command = ["train", "demo", "--recipe", recipe, "--steps", str(steps), "--mesh", "fsdp=8", "--run-dir", str(folder)]
    quiet = ["--distributed.cpu-devices", "8", "--log.no-tensorboard", "--checkpoint.every", "0", "--no-sample"]
    subprocess.run([sys.executable, "-c", entry, *command, *quiet, *flags], check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [row["loss"] for row in rows[-20:]]
    validation = [row["validation_loss"] for row in rows if "validation_loss" in row][-1]
    return {"last_20": round(sum(last) / len(last), 4), "validation": round(validation, 4)}


if __name__ == "__main__":
    main()
