"""Whether Halfbyte's packages resolve, as wheels alone, for every platform that the install page names: a dry run of
pip for each, nothing is installed. Prints a table; exits with 1 if one does not resolve.

    python .ci/wheels.py [--json]
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MACHINES = ("x86_64", "aarch64")
GLIBC = range(17, 36)  # minor versions of glibc 2 that wheels name
CASES = [
    (extra, machine, python)
    for extra in ("", "cuda12", "cuda13", "tpu")
    for machine in MACHINES
    for python in ("3.13", "3.12", "3.11")
    if extra != "tpu" or machine == "x86_64"  # TPU hosts are x86-64
]


def requirements(extra: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["dependencies"] + (project["optional-dependencies"][extra] if extra else [])


def constraints(folder: str, python: str) -> str:
    """constraints.txt as that Python reads it: pip asks the running interpreter for markers, not the one it is told."""
    old = tuple(map(int, python.split("."))) < (3, 12)
    kept = []
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        requirement, _, marker = line.partition(";")
        if not marker.strip() or marker.strip() == f'python_version {"<" if old else ">="} "3.12"':
            kept.append(requirement)
    path = Path(folder, "constraints.txt")
    path.write_text("\n".join(kept), encoding="utf-8")
    return str(path)


def resolve(extra: str, machine: str, python: str) -> dict:
    """What pip would install on that platform, by name; or what it says when it cannot."""
    tags = [word for glibc in GLIBC for word in ("--platform", f"manylinux_2_{glibc}_{machine}")]
    tags += ["--platform", f"manylinux2014_{machine}", "--platform", f"linux_{machine}"]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--target", folder,
            "--report", f"{folder}/report.json", "--only-binary=:all:",
            "--ignore-requires-python", "--python-version", python, *tags,
            "--constraint", constraints(folder, python), *requirements(extra),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        row = {"extra": extra or "cpu", "machine": machine, "python": python, "resolves": done.returncode == 0}
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return {**row, "error": " ".join(errors)[:300]}
        found = json.loads(Path(folder, "report.json").read_text(encoding="utf-8"))["install"]
        versions = {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in found}
        return {**row, "packages": len(versions), "jax": versions["jax"], "plugin": plugin_of(versions)}


def plugin_of(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {versions[name]}" for name in sorted(versions) if "plugin" in name or name == "libtpu")


def main() -> int:
    rows = []
    for case in CASES:
        row = resolve(*case)
        rows.append(row)
        what = f"jax {row['jax']}, {row['packages']} packages  {row['plugin']}" if row["resolves"] else row["error"]
        shown = sys.stderr if "--json" in sys.argv else sys.stdout
        print(f"{row['extra']:<7} {row['machine']:<8} python {row['python']:<5} {what}", file=shown, flush=True)
    if "--json" in sys.argv:
        print(json.dumps(rows, indent=1))
    return 0 if all(row["resolves"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
