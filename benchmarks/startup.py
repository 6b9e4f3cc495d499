"""What it costs to start: CPU seconds of a command that does nothing yet, beside those of the packages it stands on.

    python benchmarks/startup.py [--json]

Run it in an environment without the CUDA compiler plugin (extra `plan`), as users have it: with the plugin `import jax`
alone takes three times as long. Limits: `import halfbyte` 0.2 s, `halfbyte --help` 0.5 s, `halfbyte train --help` 2 s,
on two quiet cores. Each is the least of three: another program on the machine makes a start slower, nothing makes it
faster.
"""

import json
import os
import platform
import resource
import subprocess
import sys

ENTRY = "from halfbyte.cli.main import entry; entry()"
CASES = {
    "python": (["-c", "pass"], None),
    "import numpy": (["-c", "import numpy"], None),
    "import jax": (["-c", "import jax"], None),
    "import halfbyte": (["-c", "import halfbyte"], 0.2),
    "halfbyte --help": (["-c", ENTRY, "--help"], 0.5),
    "halfbyte recipes --help": (["-c", ENTRY, "recipes", "--help"], None),
    "halfbyte train --help": (["-c", ENTRY, "train", "--help"], 2.0),
}
REPEATS = 3


def cpu_seconds(arguments: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


def main() -> None:
    found = {name: min(cpu_seconds(words) for _ in range(REPEATS)) for name, (words, _) in CASES.items()}
    if "--json" in sys.argv:
        rows = [{"case": name, "cpu_s": spent, "limit_s": CASES[name][1]} for name, spent in found.items()]
        print(json.dumps({"rows": rows, "python": platform.python_version(), "load": os.getloadavg()}))
        return
    print(f"CPU seconds, least of {REPEATS}; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name, spent in found.items():
        limit = CASES[name][1]
        print(f"  {name:<26} {spent:6.2f}" + ("" if limit is None else f"   at most {limit}"))


if __name__ == "__main__":
    main()
