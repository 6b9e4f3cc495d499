"""The table of emulations on a tiny linear; PyTorch's operands against `halfbyte.formats` (the oracle), bit for bit.

Nothing timed is asserted: only that every program has a row, and that a row without a time says why.
"""

import importlib.util
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfbyte.formats import random_bytes

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import emulations

SHAPE = (32, 64, 48)
HAS_TORCH = importlib.util.find_spec("torch") is not None


def wide(shape, seed):
    """Numbers over 40 binades, zeros and one outlier: blocks whose scale underflows or is subnormal."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 10, shape)
    x[rng.random(shape) < 0.1] = 0.0
    x[0, 0] = 3000.0
    return jnp.asarray(x.astype(np.float32))


def wide_data():
    tokens, inputs, outputs = SHAPE
    x, w, dy = wide((tokens, inputs), 0), wide((inputs, outputs), 1), wide((tokens, outputs), 2)
    return emulations.Data(x.astype(jnp.bfloat16), w, dy.astype(jnp.bfloat16))


# The transform's sums are exact within 16 binades; beyond, a GEMM adds in an order of its own.
EVERY = {"fprop_x", "fprop_w", "dgrad_dy", "wgrad_x", "wgrad_dy"}
CASES = [(lambda: emulations.make_data(SHAPE), EVERY), (wide_data, EVERY - {"wgrad_x", "wgrad_dy"})]


@pytest.mark.skipif(not HAS_TORCH, reason="PyTorch is not installed")
@pytest.mark.parametrize("make, equal", CASES, ids=["normal", "wide"])
def test_pytorch_makes_the_codes_and_scales_of_the_definition(make, equal):
    import torch
    import torch_emulation

    data = make()
    noise = random_bytes(jax.random.key(5), data.dy.shape)
    x, w, dy = (torch.from_numpy(np.array(a.astype(jnp.float32))) for a in (data.x, data.w, data.dy))
    found = torch_emulation.operands(
        x.to(torch.bfloat16), w, dy.to(torch.bfloat16), torch_emulation.hadamard_matrix("cpu"),
        torch.from_numpy(np.array(noise)),
    )  # fmt: skip
    differing = emulations.count_differing(found, emulations.definition(data, noise))
    assert set(differing) == EVERY
    assert {name: differing[name] for name in equal} == dict.fromkeys(equal, 0)


def test_every_program_has_a_row_and_a_row_without_a_time_says_why(tmp_path, capsys):
    file = tmp_path / "emulations.json"
    flags = ["--shapes", "x".join(map(str, SHAPE)), "--skip", "compile", "--threads", "2", "--out", str(file)]
    assert emulations.main(flags) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    assert {"device", "jax", "torch", "python", "commit"} <= set(report["environment"])
    rows = {f"{row['framework']} {row['name']}": row for row in report["rows"]}
    timed = {name for name, row in rows.items() if row["forward_ms"]}
    assert {"JAX bf16 matmul", "Halfbyte qdot nvfp4, auto", "Halfbyte qdot fp8, auto"} <= timed
    untimed = {"JAX scaled_dot_general nvfp4", "PyTorch nvfp4 emulation, torch.compile", "Halfbyte qdot nvfp4, carrier"}
    assert untimed <= set(rows)
    assert ("PyTorch nvfp4 emulation, eager" in timed) == HAS_TORCH
    for name in set(rows) - timed:
        assert rows[name]["note"].startswith(("absent: ", "not run: "))
    assert rows["Halfbyte qdot nvfp4, auto"]["noise"] > 0.05  # it did quantize
    assert "torch.compile" in capsys.readouterr().out
