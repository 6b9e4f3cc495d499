"""A family that a stranger adds: Gemma 2 (GeGLU, norms before and after, a cap on logits), kept as a patch of two files
and applied to a copy of the tree. Oracle: `Gemma2ForCausalLM` of `transformers`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .test_exercises import HERE, applied

PATCH = HERE / "gemma2.patch"
CLOSE = 5e-5  # float32 sums of up to 128 terms in another order, of logits up to 5


def test_family_is_two_files():
    touched = [line for line in PATCH.read_text().splitlines() if line.startswith("+++ ")]
    assert touched == ["+++ b/src/halfbyte/models/config.py", "+++ b/src/halfbyte/models/llama.py"]


@pytest.mark.slow
def test_gemma_2_trains_and_its_logits_are_those_of_transformers(tmp_path, quick_environment):
    pytest.importorskip("torch", reason="needs the extra `interop`")
    pytest.importorskip("transformers", reason="needs the extra `interop`")
    path = [str(applied(tmp_path, PATCH)), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = os.environ | quick_environment | {"PYTHONPATH": os.pathsep.join(path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(Path(HERE, "gemma2_steps.py")), str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("kinds") == ["Gemma2ForCausalLM"] * 2
    assert "logit_cap" in found.pop("refusal")  # no family of theirs has a cap without these norms
    assert 2.5 < found.pop("largest") < 5  # the cap bends them
    assert all(off < CLOSE for off in found.values()), found
