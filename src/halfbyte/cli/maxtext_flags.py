"""MaxText's `key=value` arguments, answered with their translation line by line (docs/from-maxtext.md)."""

import re
from collections.abc import Callable, Sequence

ARGUMENT = re.compile(r"([a-z][a-z0-9_]*)=(.*)", re.DOTALL)
Translation = Callable[[str], str]


def renamed_flag(name: str) -> Translation:
    """The same value under another name."""
    return lambda value: f"--{name} {value}"


def axis(name: str) -> Translation:
    return lambda value: "" if value in ("1", "") else f"--mesh {name}={value}"


def boolean_flag(name: str) -> Translation:
    group, dot, last = name.rpartition(".")
    return lambda value: f"--{name}" if value.lower() == "true" else f"--{group}{dot}no-{last}"


def no_flag(text: str) -> Translation:
    """No flag: why none is needed."""
    return lambda value: f"# {text}"


def mapped_flag(**by_value: str) -> Translation:
    """A flag for each value; another value is passed on with a question."""
    return lambda value: by_value.get(value, f"# no counterpart of {value!r}; see docs/from-maxtext.md")


REMAT_OF_MAXTEXT = {
    "minimal": "dots",
    "minimal_with_context": "dots",
    "full": "full",
    "none": "none",
    "custom": "quantized",
}

KEYS: dict[str, Translation] = {
    "model_name": lambda value: value,
    "run_name": lambda value: f"--run-dir runs/{value}",
    "base_output_directory": lambda value: f"--run-dir {value.rstrip('/')}/NAME",
    "quantization": lambda value: f"--recipe {value or 'bf16'}",
    "steps": renamed_flag("steps"),
    "per_device_batch_size": lambda value: f"--batch {value}*DEVICES",
    "gradient_accumulation_steps": renamed_flag("accumulate"),
    "max_target_length": renamed_flag("seq"),
    "ici_data_parallelism": axis("data"),
    "dcn_data_parallelism": axis("dcn.data"),
    "ici_fsdp_parallelism": axis("fsdp"),
    "dcn_fsdp_parallelism": axis("dcn.fsdp"),
    "ici_tensor_parallelism": axis("tensor"),
    "ici_context_parallelism": axis("context"),
    "remat_policy": lambda value: f"--remat {REMAT_OF_MAXTEXT.get(value, value)}",
    "scan_layers": lambda value: "--unroll 1" if value.lower() == "true" else "--unroll 0",
    "attention": no_flag("attention is chosen by capability: cuDNN on NVIDIA GPUs, XLA elsewhere"),
    "opt_type": renamed_flag("optimizer.name"),
    "learning_rate": renamed_flag("optimizer.learning-rate"),
    "lr_schedule_type": renamed_flag("optimizer.schedule"),
    "warmup_steps_fraction": renamed_flag("optimizer.warmup"),
    "learning_rate_final_fraction": renamed_flag("optimizer.final"),
    "wsd_decay_steps_fraction": renamed_flag("optimizer.decay"),
    "adam_b1": renamed_flag("optimizer.b1"),
    "adam_b2": renamed_flag("optimizer.b2"),
    "adam_eps": renamed_flag("optimizer.eps"),
    "adam_weight_decay": renamed_flag("optimizer.weight-decay"),
    "mu_dtype": renamed_flag("optimizer.mu-dtype"),
    "gradient_clipping_threshold": renamed_flag("optimizer.clip"),
    "dtype": renamed_flag("precision.compute-dtype"),
    "init_weights_seed": renamed_flag("seed"),
    "data_shuffle_seed": renamed_flag("seed"),
    "dataset_type": mapped_flag(
        synthetic="--data synthetic",
        grain="--data DIR  # made by: halfbyte data prepare FILES --tokenizer T --out DIR",
    ),
    "grain_train_files": lambda value: f"--data DIR  # halfbyte data prepare '{value}' --tokenizer T --out DIR",
    "packing": no_flag("data is always packed; packed documents do not see each other"),
    "eval_interval": lambda value: "--validation.no-at-end" if value.startswith("-") else f"--validation.every {value}",
    "eval_steps": renamed_flag("validation.batches"),
    "checkpoint_period": renamed_flag("checkpoint.every"),
    "max_num_checkpoints_to_keep": renamed_flag("checkpoint.keep-last"),
    "log_period": renamed_flag("log.every"),
    "enable_tensorboard": boolean_flag("log.tensorboard"),
    "profiler": mapped_flag(xplane="--profile xprof", nsys="--profile nsys", **{"": "# no profile is the default"}),
    "skip_first_n_steps_for_profiler": lambda value: f"--profile-start {value}+1",
    "profiler_steps": lambda value: f"--profile-stop START+{value}-1",
    "jax_cache_dir": renamed_flag("compile-cache"),
    "jax_distributed_initialization_timeout": renamed_flag("distributed.initialization-timeout-s"),
}


def refuse_maxtext(argv: Sequence[str]) -> None:
    """ValueError with a line for each argument if some are MaxText's `key=value` (or its YAML file)."""
    found = maxtext_arguments(argv)
    if not found:
        return
    width = max(len(word) for word in found)
    lines = [f"  {word:<{width}}   {translated(word)}\n" for word in found]
    raise ValueError(f"these are MaxText's arguments; here they are:\n{''.join(lines)}together: {join_command(found)}")


def maxtext_arguments(argv: Sequence[str]) -> list[str]:
    """The words that are `key=value` or a YAML file and no flag's value."""
    free = [word for at, word in enumerate(argv) if at == 0 or not argv[at - 1].startswith("--") or "=" in argv[at - 1]]
    assigned = [word for word in free if ARGUMENT.fullmatch(word)]
    files = [word for word in free if assigned and word.endswith((".yml", ".yaml"))]
    return [*files, *assigned]


def translated(word: str) -> str:
    """One argument in Halfbyte's words."""
    match = ARGUMENT.fullmatch(word)
    if match is None:
        return "# a run is a named preset and flags: halfbyte train --help"
    key, value = match[1], match[2].strip("'\"")
    if key not in KEYS:
        return "# not known here; docs/from-maxtext.md lists what is"
    return KEYS[key](value) or "# 1 is the default"


def join_command(words: Sequence[str]) -> str:
    """The whole command: the model first, the axes in one --mesh, remarks left out."""
    flags = [translated(word).partition("  #")[0] for word in words]
    flags = list(dict.fromkeys(text for text in flags if text and not text.startswith("#")))
    axes = [text.removeprefix("--mesh ") for text in flags if text.startswith("--mesh ")]
    models = [text for text in flags if not text.startswith("-")]
    rest = [text for text in flags if text.startswith("--") and not text.startswith("--mesh ")]
    mesh = [f"--mesh {','.join(axes)}"] if axes else []
    return " ".join(["halfbyte train", *models, *rest, *mesh])
