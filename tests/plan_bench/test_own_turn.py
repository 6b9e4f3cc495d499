"""Gradients scattered in the turn that makes them (`--xla-flags own-turn`), on eight GB200 without one. Oracle:
the compiled program's own text.
"""

import dataclasses
import re

import pytest
from eight_gpus import check, compile_for, config_of, kernels_kept, recommended

from halfbyte.devices import device_by_name

pytestmark = pytest.mark.slow


@pytest.mark.cuda_compiler
def test_a_gradient_that_is_scattered_in_its_own_turn_is_copied_into_no_other(tmp_path, monkeypatch):
    """On eight GB200, where it hides there. By the recommended flags three whole gradients a turn are copied."""
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    config = config_of("nvfp4", batch=32)
    config = dataclasses.replace(config, policy="mlp_mxfp8", remat="none", schedule_by="roofline")
    options = recommended("own-turn") | kernels_kept(tmp_path)
    mesh, compiled = compile_for(device_by_name("gb200"), config, hosts=2, options=options)
    check(compiled, config, mesh, device_by_name("gb200"))
    assert not re.findall(r"= f32\[(?:4096,14336|14336,4096)\]\S* copy\(", compiled.as_text())
