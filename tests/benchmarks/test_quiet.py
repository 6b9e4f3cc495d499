"""The study of twins: its plan, its replicas against the library's own step, and its statistics."""

import json
import math
import pathlib
import sys

import numpy as np
import pytest

from halfbyte.data.encode import row_dtype, rows_to_batch

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import quiet  # noqa: E402
import quiet_data  # noqa: E402
import quiet_noise  # noqa: E402

MODEL = {"name": "toy", "vocab_size": 512, "embed": 32, "mlp": 64, "layers": 2, "heads": 1, "kv_heads": 1,
         "head_dim": 32, "max_seq": 32, "tied": True}  # fmt: skip
TOY = {
    "sizes": {"toy": MODEL},
    "base": {"policy": "all_linear", "batch": 2, "seq": 32, "precision.backend": "emulated"},
    "setups": {"fast": {"optimizer.learning_rate": 4e-3}, "slow": {"optimizer.learning_rate": 1e-3}},
    "jobs": {"bf16": {"size": "toy", "tokens_per_parameter": 0.05, "recipe": "bf16", "setups": ["fast", "slow"],
                      "seeds": [0], "twins": 2}},
    "calls": {"first": ["bf16"]},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:backend='carrier' was renamed:FutureWarning")  # the plan was committed before
def test_plan_jobs_build_and_calls_name_jobs():
    """Every job of the committed plan is one program, and every call names jobs."""
    plan = json.loads((ROOT / "docs/evidence/quiet/plan.json").read_text())
    jobs = {name: quiet.job_of(plan, name) for name in plan["jobs"]}
    assert quiet.parameters(jobs["bf16-qk_low-16"].config) - 2 * 4 * 64 == 3_016_960  # the norms of queries and keys
    assert quiet.parameters(jobs["bf16-today"].config) == 3_016_960
    assert jobs["nvfp4-today"].replicas[0].config.steps == 2946
    assert {name for call in plan["calls"].values() for name in call} <= jobs.keys()


def test_job_whose_setups_need_two_programs_is_refused():
    plan = TOY | {"setups": {"fast": {}, "slow": {"z_loss": 1e-4}}}
    with pytest.raises(ValueError, match="different programs"):
        quiet.job_of(plan, "bf16")


def packed(folder):
    """Random rows as `quiet_data.write` stores them."""
    random = np.random.default_rng(0)
    rows = {"tokens": random.integers(0, 512, (64, 33)), "held-tokens": random.integers(0, 512, (5, 33))}
    arrays = {name: x.astype("<u2") for name, x in rows.items()}
    parts = np.array_split(arrays.pop("tokens"), quiet_data.PARTS)
    arrays |= {f"tokens-{number}": part for number, part in enumerate(parts)}
    arrays |= {"segments": np.ones((64, 33), "<u2"), "held-segments": np.ones((5, 33), "<u2")}
    arrays["order-0"] = random.permutation(64).astype("<u4")
    folder.mkdir()
    for name, array in arrays.items():
        (folder / f"{name}.xz").write_bytes(quiet_data.compress(array))
    facts = {"rows": 64, "seq": 32, "vocab_size": 512, "seeds": [0], "sources": {"one": 3, "two": 2},
             "files": {path.name: quiet_data.digest_of(path) for path in sorted(folder.glob("*.xz"))}}  # fmt: skip
    (folder / "facts.json").write_text(json.dumps(facts))
    return folder


def test_batches_are_those_of_the_library():
    """Oracle: `halfbyte.data.encode.rows_to_batch` on rows with several documents and padding."""
    random = np.random.default_rng(0)
    rows = np.empty(7, row_dtype(32, 512))
    rows["tokens"] = random.integers(0, 512, (7, 33))
    rows["segments"] = np.sort(random.integers(0, 4, (7, 33)), axis=1)[:, ::-1]
    batch = quiet.rows_to_batch(rows["tokens"], rows["segments"])
    for name, expected in rows_to_batch(rows).items():
        np.testing.assert_array_equal(batch[name], expected, name)


@pytest.mark.slow
def test_replicas_train_as_the_library_step_does(tmp_path):
    """Oracle: `jit_train_step` of the library on the same batches; the first loss to the last bits."""
    quiet.run(TOY, packed(tmp_path / "data"), tmp_path / "out", ["bf16"], math.inf, {}, 1)
    records, rows = quiet_noise.read([tmp_path / "out"])
    assert not [r for r in records if r["kind"] in ("failed", "left out")]
    compared = next(r for r in records if r["kind"] == "compared")
    assert compared["apart"][0] < 1e-6 and max(compared["apart"]) < 1e-3
    table = {row["setup"]: row for row in quiet_noise.summarize(records, rows)}
    assert table.keys() == {"fast", "slow"} and table["fast"]["losses"] != table["slow"]["losses"]
    per_row = rows["bf16/last"][0].sum() / rows["scored"].sum()
    assert per_row == pytest.approx(table["fast"]["losses"]["0"][0], rel=1e-6)


def test_deviation_of_pairs_is_their_root_mean_square():
    runs = {0: [4.0, 4.1], 1: [4.0, 3.8]}
    value, freedom = quiet_noise.deviation(runs)
    mean = np.mean([4.0, 4.1, 4.0, 3.8])
    assert freedom == 2
    assert value == pytest.approx(100 * math.sqrt((0.1**2 + 0.2**2) / 2) / mean)


def test_deviation_and_power_recover_simulated_noise():
    """Oracle: simulated runs of known noise, and t tests of simulated studies."""
    random = np.random.default_rng(1)
    runs = {seed: (4.0 + random.standard_normal() + 0.01 * random.standard_normal(4)).tolist() for seed in range(400)}
    assert quiet_noise.deviation(runs)[0] == pytest.approx(100 * math.sqrt(2) * 0.01 / 4, rel=0.08)
    gap = quiet_noise.detected(1.0, 3)
    studies = gap + random.standard_normal((20_000, 3))
    t = studies.mean(1) / (studies.std(1, ddof=1) / math.sqrt(3))
    assert np.mean(t > 4.3027) == pytest.approx(0.8, abs=0.01)
