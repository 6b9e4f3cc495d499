"""A tiny Gemma 2 under the patched program: trained, exported, read by `transformers`; and one of theirs, read here,
generated from, and written again. Prints the largest differences of logits. Arguments: a folder to work in."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from halfbyte import models
from halfbyte.cli.main import main
from halfbyte.hf import ExportModel, HfFolder, config_from_hf, config_to_hf, export_model, load_params

SIZES = "--model.layers 2 --model.embed 64 --model.mlp 96 --model.heads 2 --model.kv-heads 1 --batch 2 --seq 64"
# Generating and scoring are tried below, against theirs; blocks of 32 are the quantized MLP that compiles soonest.
ALONE = "--no-sample --validation.no-at-end --recipe mxfp8"
FAMILY = "--model.activation gelu --model.tied --model.post-norms --model.logit-cap 5 --model.norm-eps 1e-6"
FLOAT = models.ModelContext(compute_dtype=jnp.float32)
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 24))


def theirs_of(folder: Path) -> tuple[str, np.ndarray]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager")
    with torch.no_grad():
        return type(model).__name__, model(torch.from_numpy(TOKENS)).logits.numpy()


def ours_of(folder: Path) -> tuple[models.LlamaConfig, models.Params, np.ndarray]:
    with HfFolder(folder) as opened:
        cfg = config_from_hf(opened.config, "gemma")
        params = load_params(opened, cfg)
    logits = jax.jit(lambda p: models.apply(cfg, p, {"tokens": jnp.asarray(TOKENS, jnp.int32)}, FLOAT))(params)
    return cfg, params, np.asarray(logits)


def write_theirs(folder: Path) -> None:
    """Random weights of theirs, norms far from their start; no sliding window, no cap on attention."""
    torch.manual_seed(0)
    fields = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 32}
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    attention = {"layer_types": ["full_attention"] * 2, "attn_logit_softcapping": None, "final_logit_softcapping": 5.0}
    config = transformers.Gemma2Config(**fields, **sizes, **attention, max_position_embeddings=128)
    model = transformers.Gemma2ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)


def refusal(cfg: models.LlamaConfig) -> str:
    try:
        config_to_hf(cfg)
    except ValueError as error:
        return str(error)
    return ""


work = Path(sys.argv[1])
assert main(["train", "--steps", "2", "--run-dir", str(work / "run"), *f"{SIZES} {FAMILY} {ALONE}".split()]) == 0
assert main(["export", str(work / "run"), "--dtype", "float32", "--out", str(work / "trained")]) == 0
write_theirs(work / "theirs")
kind, expected = theirs_of(work / "trained")
other, reference = theirs_of(work / "theirs")
cfg, params, read = ours_of(work / "theirs")
export_model(ExportModel(cfg, params, origin=None), work / "back", to="hf", dtype="float32")
rows, batch = jnp.asarray(TOKENS, jnp.int32), {"tokens": jnp.asarray(TOKENS, jnp.int32)}
last = jax.jit(lambda p: models.prefill(cfg, p, rows, None, FLOAT, size=32)[0])(params)
scored = jax.jit(lambda p: models.token_nll(cfg, p, batch | {"targets": rows}, FLOAT))(params)
picked = -np.take_along_axis(np.asarray(jax.nn.log_softmax(read)), TOKENS[..., None], -1)[..., 0]
print(json.dumps({
    "kinds": [kind, other],
    "refusal": refusal(cfg.replace(post_norms=False)),
    "trained": float(np.abs(ours_of(work / "trained")[2] - expected).max()),
    "read": float(np.abs(read - reference).max()),
    "written": float(np.abs(theirs_of(work / "back")[1] - reference).max()),
    "generated": float(np.abs(np.asarray(last) - read[:, -1]).max()),
    "scored": float(np.abs(np.asarray(scored) - picked).max()),
    "largest": float(np.abs(reference).max()),
}))  # fmt: skip
