"""Makes src/halfbyte/diagnosis/bands.json: the bands in which healthy gains lie.

A small Llama is initialised and trained for a few steps in bf16 from each of the seeds below, which no test uses, and
probed at initialisation and after training under every recipe. A band is the mean of the gains, 6 standard deviations
on each side.

    python benchmarks/radar_bands.py
"""

import argparse
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from halfbyte import models
from halfbyte.diagnosis.bands import WIDTH, fit_bands
from halfbyte.diagnosis.radar import Probe, step_of
from halfbyte.models import LlamaConfig
from halfbyte.recipe import recipe, recipe_names
from halfbyte.train import LogConfig, TrainConfig, create_state, jit_train_step, resolve, run_mesh

FIRST_SEED, SEEDS, STEPS = 1000, 20, 30
OUT = Path(__file__).parents[1] / "src" / "halfbyte" / "diagnosis" / "bands.json"
LEFT_OUT = ("bf16", "fp4_one_scale")  # nothing to look at; not healthy
MODEL = LlamaConfig(
    name="probe", vocab_size=256, embed=64, mlp=128, layers=2, heads=4, kv_heads=2, head_dim=16, max_seq=64
)
CONFIG = TrainConfig(
    name="probe", model=MODEL, recipe="bf16", policy="all_linear", data="synthetic", steps=STEPS, batch=16, seq=64,
    log=LogConfig(tensorboard=False),
)  # fmt: skip


def batch_of(seed: int, place: int = 0) -> dict[str, jax.Array]:
    """Tokens of a Zipf law, each row half copied, so that there is something to learn."""
    random = np.random.default_rng([seed, place])
    tokens = (random.zipf(1.3, (CONFIG.batch, CONFIG.seq)) % MODEL.vocab_size).astype(np.int32)
    tokens[:, 32:] = tokens[:, :32]
    rows = {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "segments": np.ones_like(tokens),
        "positions": np.tile(np.arange(CONFIG.seq, dtype=np.int32), (CONFIG.batch, 1)),
    }
    return {name: jnp.asarray(value) for name, value in rows.items()}


def trained(seeds: list[int]) -> dict[int, list]:
    """Weights of each seed at the start and after STEPS steps in bf16."""
    mesh = run_mesh(CONFIG)
    step = jit_train_step(CONFIG, resolve(MODEL, CONFIG.policy, recipe("bf16")), mesh)
    found = {}
    for seed in seeds:
        state = create_state(dataclasses.replace(CONFIG, seed=seed), mesh)
        first = jax.device_get(state.params)
        for place in range(STEPS):
            state, _ = step(state, batch_of(seed, place))
        found[seed] = [first, jax.device_get(state.params)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipes", default=",".join(name for name in recipe_names() if name not in LEFT_OUT))
    args = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)  # compiling is most of the time
    weights = trained(list(range(FIRST_SEED, FIRST_SEED + SEEDS)))
    fitted: dict = {}
    for name in args.recipes.split(","):
        config = dataclasses.replace(CONFIG, recipe=name)
        probe = Probe(config, resolve(MODEL, config.policy, recipe(name)), None)
        probes = [
            probe.gemms(params, batch_of(seed, place), step_of(seed, place))
            for seed, pair in weights.items()
            for place, params in zip((0, STEPS), pair, strict=True)
        ]
        fitted.update(fit_bands(probes))
        print(name, {kind.split()[0]: band for kind, band in fit_bands(probes).items()}, flush=True)
        write(fitted)


def write(fitted: dict) -> None:
    """The file, joined with the bands that it has of other recipes."""
    known = json.loads(OUT.read_text(encoding="utf-8"))["bands"] if OUT.is_file() else {}
    about = {
        "seeds": [FIRST_SEED, FIRST_SEED + SEEDS - 1],
        "model": dataclasses.asdict(MODEL),
        "parameters": models.count_params(MODEL),
        "steps": [0, STEPS],
        "deviations": WIDTH,
        "jax": jax.__version__,
    }
    text = json.dumps({"about": about, "bands": dict(sorted({**known, **fitted}.items()))}, indent=1)
    OUT.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
