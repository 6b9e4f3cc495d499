"""Checkpoints of the real MaxText: killed and resumed, and between bf16 and te_nvfp4. Oracle: undisturbed runs.

All runs have one folder layout and one learning rate schedule; checkpoints are those of steps 0, 5 and 7.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from maxtext_matrix import TINY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("maxtext") is None, reason="MaxText needs Python 3.12 or later"),
]
STEPS, SAVED = 8, 5
SAVING = ["enable_checkpointing=true", "async_checkpointing=false", f"checkpoint_period={SAVED}", f"steps={STEPS}"]
OWN = ("quantization", "enable_checkpointing", "steps")
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "DECOUPLE_GCLOUD": "TRUE",
    "PYTHONUNBUFFERED": "1",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
}


def train(folder, quantization, kill_after=None):
    """Returns the loss of each step that this process wrote; `kill_after`: the step after which it is killed."""
    metrics = folder / f"metrics_{len(list(folder.glob('metrics_*')))}.json"
    arguments = [word for word in TINY if word.partition("=")[0] not in OWN] + SAVING
    arguments += [f"quantization={quantization}", f"base_output_directory={folder}", f"metrics_file={metrics}"]
    command = [sys.executable, "-m", "halfbyte.integrations.maxtext", "src/maxtext/configs/base.yml", *arguments]
    lines = []
    with subprocess.Popen(
        command, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout:
            lines.append(line)
            if kill_after is not None and f"completed step: {kill_after}," in line:
                process.send_signal(signal.SIGKILL)
    assert process.returncode == (0 if kill_after is None else -signal.SIGKILL), "".join(lines[-20:])
    return {int(row["step"]): row["learning/loss"] for row in map(json.loads, metrics.read_text().splitlines())}


def saved_steps(folder):
    return sorted(int(path.name) for path in (folder / "matrix" / "checkpoints").iterdir() if path.name.isdigit())


def leaves(folder):
    """Returns path, shape and dtype of every array in the checkpoint of step SAVED."""
    import orbax.checkpoint as ocp
    from jax.tree_util import keystr, tree_leaves_with_path

    tree = ocp.PyTreeCheckpointer().metadata(folder / "matrix" / "checkpoints" / str(SAVED) / "items")
    tree = getattr(tree, "item_metadata", tree)
    tree = getattr(tree, "tree", tree)
    return {keystr(path): (leaf.shape, str(leaf.dtype)) for path, leaf in tree_leaves_with_path(tree)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """quantization -> (folder, losses) of a run of all steps."""
    folders = {name: tmp_path_factory.mktemp(name or "bf16") for name in ("", "te_nvfp4")}
    return {name: (folder, train(folder, name)) for name, folder in folders.items()}


def test_killed_and_resumed_run_has_the_losses_of_an_undisturbed_one(undisturbed, tmp_path):
    _, expected = undisturbed["te_nvfp4"]
    train(tmp_path, "te_nvfp4", kill_after=SAVED + 1)
    assert saved_steps(tmp_path) == [0, SAVED]
    resumed = train(tmp_path, "te_nvfp4")
    print("KILLED", json.dumps({"undisturbed": expected, "resumed": resumed}))
    assert resumed == {step: expected[step] for step in range(SAVED + 1, STEPS)}


@pytest.mark.parametrize(("before", "after"), [("", "te_nvfp4"), ("te_nvfp4", "")])
def test_checkpoint_of_one_precision_continues_in_the_other(undisturbed, tmp_path, before, after):
    """The step after the change has the loss of the run before it but for the rounding of one forward pass."""
    folder, expected = undisturbed[before]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "matrix" / "checkpoints" / str(STEPS - 1))
    assert saved_steps(tmp_path) == [0, SAVED]
    continued = train(tmp_path, after)
    print("CONTINUED", json.dumps({"from": before or "bf16", "undisturbed": expected, "continued": continued}))
    assert list(continued) == list(range(SAVED + 1, STEPS))
    first = SAVED + 1
    assert continued[first] != expected[first]
    assert continued[first] == pytest.approx(expected[first], rel=0.02)
    assert continued[first] < expected[SAVED]


def test_checkpoints_of_both_precisions_have_the_same_arrays(undisturbed):
    bf16, nvfp4 = (leaves(folder) for folder, _ in undisturbed.values())
    assert bf16 == nvfp4
    assert len(bf16) > 20
