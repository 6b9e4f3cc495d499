"""Runs the real MaxText's trainer for two steps per configuration, with Halfbyte's recipe installed: JSON lines.

    python3 tests/integrations/maxtext_matrix.py [NAME ...]      names: see CASES; 8 devices where a name says so

A line holds which dots were replaced (path -> executions), how many were left, the number of keys that reached dots and
of different ones, for y, dx and dw the number of dots whose bits are those of `hb.qdot` of the recorded operands, the
largest relative distance of the others, the gradient norms and losses. `--markdown FILE` prints the lines of a file as
a table.
"""

import collections
import functools
import json
import os
import sys
import tempfile
from pathlib import Path

EIGHT = "8 devices"
if __name__ == "__main__":
    devices = "8" if any(EIGHT in name for name in sys.argv[1:]) else "1"
    flags = f"--xla_backend_optimization_level=0 --xla_force_host_platform_device_count={devices}"
    os.environ |= {"JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE", "TF_CPP_MIN_LOG_LEVEL": "2", "XLA_FLAGS": flags}

TINY = """hardware=cpu dataset_type=synthetic enable_checkpointing=false base_emb_dim=64 base_num_query_heads=4
base_num_kv_heads=2 head_dim=16 base_mlp_dim=128 base_num_decoder_layers=2 vocab_size=256 max_target_length=64
per_device_batch_size=2 decoder_block=llama2 attention=dot_product skip_jax_distributed_system=true log_config=false
run_name=matrix steps=2 learning_rate=3e-3 jax_cache_dir= quantization=te_nvfp4""".split()
MOE = "decoder_block=mixtral num_experts=4 num_experts_per_tok=2 base_moe_mlp_dim=128 megablox=false"
DEEPSEEK = (
    "decoder_block=deepseek attention_type=mla base_num_kv_heads=4 q_lora_rank=32 kv_lora_rank=32 "
    "qk_nope_head_dim=16 qk_rope_head_dim=16 v_head_dim=16 first_num_dense_layers=1 base_num_decoder_layers=3 "
    "num_experts=4 num_experts_per_tok=2 "
    "base_moe_mlp_dim=64 shared_experts=1 megablox=false sparse_matmul=false"
)
EACH = {
    "Llama 2 and 3": "",
    "Gemma 2": "decoder_block=gemma2 base_num_decoder_layers=4",
    "Gemma 3": "model_name=gemma3-4b override_model_config=true decoder_block=gemma3 base_num_decoder_layers=8",
    "Qwen3": "decoder_block=qwen3 use_qk_norm=true",
    "Mixtral, dense matmul": f"{MOE} sparse_matmul=false halfbyte_policy=all_linear",
    "Mixtral, sparse matmul": f"{MOE} sparse_matmul=true halfbyte_policy=all_linear",
    "DeepSeek-like": DEEPSEEK,
}
CASES = {
    **{f"{name}, scan": args for name, args in EACH.items()},
    **{f"{name}, no scan": f"{args} scan_layers=false" for name, args in EACH.items()},
    "param_scan_axis 0": "param_scan_axis=0",
    "remat full": "remat_policy=full",
    "remat minimal": "remat_policy=minimal",
    "remat save_qkv_proj": "remat_policy=save_qkv_proj",
    "2 microbatches, scan": "gradient_accumulation_steps=2",
    "2 microbatches, no scan": "gradient_accumulation_steps=2 scan_layers=false",
    "paper, scan": "base_num_decoder_layers=6 halfbyte_policy=paper",
    "paper, scan axis 0": "base_num_decoder_layers=6 halfbyte_policy=paper param_scan_axis=0",
    "paper, no scan": "base_num_decoder_layers=6 halfbyte_policy=paper scan_layers=false",
    f"fsdp 8, {EIGHT}": "ici_fsdp_parallelism=8",
    f"fsdp 4 x tensor 2, {EIGHT}": "ici_fsdp_parallelism=4 ici_tensor_parallelism=2",
    f"fsdp 4 x context 2, {EIGHT}": "ici_fsdp_parallelism=4 ici_context_parallelism=2",
}


def record_dots(interpreter, dots):
    """Appends (key words, how, dims, x, w, y, dy, dx, dw) of every dot whose backward pass runs to `dots`."""
    import jax
    import numpy as np

    single, several = interpreter.dot_as_linear, interpreter.dots_as_linears

    def recorded(fn, sides, how, keys):
        @jax.custom_vjp
        def dot(xs, ws, keys):
            return fn(xs, ws, keys)

        def forward(xs, ws, keys):
            ys, back = jax.vjp(lambda xs, ws: fn(xs, ws, keys), xs, ws)
            return ys, (back, xs, ws, keys, ys)

        def backward(residuals, dys):
            back, xs, ws, keys, ys = residuals
            dxs, dws = back(dys)
            for (_, _, dims), key, *arrays in zip(sides, keys, xs, ws, ys, dys, dxs, dws, strict=True):

                def note(words, *arrays, dims=dims):
                    dots.append((tuple(words.tolist()), how, dims, *map(np.asarray, arrays)))

                jax.debug.callback(note, jax.random.key_data(key), *arrays)
            return dxs, dws, None

        dot.defvjp(forward, backward)
        xs, ws, _ = zip(*sides, strict=True)
        return dot(xs, ws, tuple(keys))

    def one(x, w, dims, *, how, key, out_sharding=None):
        def fn(xs, ws, keys):
            return [single(xs[0], ws[0], dims, how=how, key=keys[0], out_sharding=out_sharding)]

        return recorded(fn, [(x, w, dims)], how, [key])[0]

    def many(sides, *, how, keys):
        def fn(xs, ws, keys):
            again = [(x, w, dims) for x, w, (_, _, dims) in zip(xs, ws, sides, strict=True)]
            return several(again, how=how, keys=keys)

        return recorded(fn, sides, how, keys)

    interpreter.dot_as_linear, interpreter.dots_as_linears = one, many


@functools.cache
def compiled_qdot(recipe, dtype):
    """Returns the function (x, w, key, dy) -> (y, dx, dw) of `hb.qdot`."""
    import jax

    import halfbyte as hb

    @jax.jit
    def qdot(x, w, key, dy):
        y, back = jax.vjp(lambda x, w: hb.qdot(x, w, recipe=recipe, key=key, out_dtype=dtype), x, w)
        return y, *back(dy)

    return qdot


def distances_to_qdot(words, how, dims, x, w, y, dy, dx, dw):
    """Returns how far y, dx and dw are from those of `hb.qdot` of the operands as matrices; None: the same bits."""
    import jax
    import numpy as np

    x_dims, w_dims = dims
    k = int(np.prod([w.shape[d] for d in w_dims]))
    x2, dx2 = (np.moveaxis(each, x_dims, range(-len(x_dims), 0)).reshape(-1, k) for each in (x, dx))
    w2, dw2 = (np.moveaxis(each, w_dims, range(len(w_dims))).reshape(k, -1) for each in (w, dw))
    y2, dy2 = (each.reshape(len(x2), -1) for each in (y, dy))
    key = jax.random.wrap_key_data(jax.numpy.asarray(words, "uint32"), impl="threefry2x32")
    expected = compiled_qdot(how.recipe, how.dtype)(x2, w2, key, dy2)
    ours, oracle = ([np.asarray(each, np.float32) for each in three] for three in ((y2, dx2, dw2), expected))
    return [
        None if np.array_equal(a, b) else float(np.linalg.norm(a - b) / np.linalg.norm(b))
        for a, b in zip(ours, oracle, strict=True)
    ]


def run(name, dots, reports):
    """Returns the facts of one configuration."""
    import jax
    from maxtext.trainers.pre_train import train

    import halfbyte.integrations.maxtext as integration

    dots.clear(), reports.clear()
    theirs, ours = integration.split_arguments([*TINY, *CASES[name].split()])
    integration.install(ours.get("halfbyte_policy", "mlp"))
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        base = Path(train.__file__).parents[2] / "configs" / "base.yml"
        train.main(["train", str(base), *theirs, f"metrics_file={metrics}", f"base_output_directory={folder}"])
        jax.effects_barrier()
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    replaced, left = collections.Counter(), collections.Counter()
    for site in reports[0].sites:
        (replaced if site.recipe else left)[site.path] += site.num_executions
    distinct = {dot[0]: dot for dot in dots}
    distances = [distances_to_qdot(*dot) for dot in distinct.values()]
    microbatches = 2 if "microbatches" in name else 1
    return {
        "name": name,
        "replaced": dict(replaced),
        "left": sum(left.values()),
        "expected_keys": len(rows) * microbatches * sum(replaced.values()),
        "keys": len(distinct),
        "equal_to_qdot": [sum(distance is None for distance in each) for each in zip(*distances, strict=True)],
        "largest_distance": max((d for each in distances for d in each if d is not None), default=0.0),
        "gradient_norm": [row["learning/raw_grad_norm"] for row in rows],
        "loss": [row["learning/loss"] for row in rows],
    }


def markdown(file):
    """Prints the table of docs/from-maxtext.md."""
    print("| configuration | dots replaced, times executed | keys | equal: y, dx, dw | loss |")
    print("|---|---|---|---|---|")
    for line in Path(file).read_text().splitlines():
        row = json.loads(line)
        if "error" in row:
            print(f"| {row['name']} | not run: {row['error']} | | | |")
            continue
        short = collections.Counter()
        for path, count in row["replaced"].items():
            parts = [part for part in path.split("/") if part not in ("decoder", "kernel", "layers")]
            short["/".join(part for part in parts if not part.isdigit() and not part.startswith("layers_"))] += count
        replaced = ", ".join(f"{path} x{count}" for path, count in sorted(short.items()))
        keys = f"{row['keys']} of {row['expected_keys']}"
        print(
            f"| {row['name']} | {replaced} | {keys} | {', '.join(map(str, row['equal_to_qdot']))} "
            f"| {row['loss'][0]:.3f}, {row['loss'][-1]:.3f} |"
        )


def main(names):
    import halfbyte.integrations.maxtext as integration
    import halfbyte.ops.adapters.jaxpr_interpreter as interpreter

    dots, reports, summarize = [], [], integration.summarize_report
    record_dots(interpreter, dots)
    integration.summarize_report = lambda report, *rest: reports.append(report) or summarize(report, *rest)
    for name in names:
        try:
            facts = run(name, dots, reports)
        except Exception as error:  # a configuration that MaxText refuses is a line of the table
            facts = {"name": name, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
        print("MATRIX " + json.dumps(facts), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--markdown"]:
        markdown(sys.argv[2])
    else:
        main(sys.argv[1:] or [name for name in CASES if EIGHT not in name])
