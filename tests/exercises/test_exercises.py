"""Change exercises: what a stranger would add, kept as patches and applied to a copy of the tree.

A format, a scale rule, an activation and a backend: each touches at most two files of the package, trains the demo by
its name, and stands in the run's manifest or config; two that touch other files share a run. Oracle: the files that
the patched program writes.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
SMALL = "--model.layers 1 --model.embed 64 --model.mlp 128 --model.heads 2 --model.kv-heads 2".split()
SMALL += "--batch 2 --seq 64".split()
ALONE = ["--no-sample"]  # what is compiled for it stands in no file

EXERCISES = {
    "mxfp6": (["--recipe", "mxfp6"], lambda site, _: site["gemms"]["fprop"]["left"] == "mxfp6 1d rne"),
    "four_over_six": (["--recipe", "nvfp4_46"], lambda site, _: site["gemms"]["wgrad"]["right"][:9] == "nvfp4_46 "),
    "gelu_erf": (["--model.activation", "gelu_erf"], lambda _, model: model["activation"] == "gelu_erf"),
    "wide_backend": (["--precision.backend", "wide"], lambda site, _: site["backend"] == "wide"),
}
TOGETHER = (("mxfp6", "wide_backend"), ("four_over_six", "gelu_erf"))


def applied(tree: pathlib.Path, *patches: pathlib.Path) -> pathlib.Path:
    # With its bytecode, which holds while a file has its time: what the patch leaves alone is not compiled again. But
    # for what another process is writing just now, under a name that is gone when it is done.
    shutil.copytree(SOURCE, tree / "src", ignore=shutil.ignore_patterns("*.egg-info", "*.pyc.*"))
    for patch in patches:
        subprocess.run(["git", "apply", "--whitespace=nowarn", str(patch)], cwd=tree, check=True)
    return tree / "src"


@pytest.mark.slow
@pytest.mark.parametrize("names", TOGETHER, ids="+".join)
def test_patch_trains_the_demo_and_stands_in_its_manifest(names, tmp_path, quick_environment):
    flags = [flag for name in names for flag in EXERCISES[name][0]]
    source = applied(tmp_path, *(HERE / f"{name}.patch" for name in names))
    path = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = os.environ | quick_environment | {"PYTHONPATH": os.pathsep.join(path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "from halfbyte.cli.main import entry; entry()", "train", "--steps", "2"]
    run = tmp_path / "run"
    command += [*SMALL, *ALONE, *flags, "--run-dir", str(run)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    manifest = json.loads((run / "manifest.json").read_text())
    phase = manifest["phases"][0] if "phases" in manifest else manifest
    sites = [site for site in phase["sites"] if site["path"].startswith("layers/mlp/")]
    model = json.loads((run / "config.json").read_text())["model"]
    assert len(sites) == 3 and all(EXERCISES[name][1](site, model) for site in sites for name in names), sites
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert losses and all(0 < loss < 20 for loss in losses)


@pytest.mark.parametrize("name", EXERCISES)
def test_patch_touches_at_most_two_files(name):
    lines = (HERE / f"{name}.patch").read_text().splitlines()
    assert 1 <= sum(line.startswith("+++ ") for line in lines) <= 2
    added = [line for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert not any(".name ==" in line or ".name in" in line for line in added)
