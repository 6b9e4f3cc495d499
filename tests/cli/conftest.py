"""A run directory made by a few real steps of training, for the commands that read one."""

import os
import random
import subprocess
import sys

import pytest

SECRET = "hunter2-8f31c0"
WORDS = "the a of union state people congress law naïve and to we shall not year nation peace war tax".split()


@pytest.fixture(autouse=True, scope="module")
def _quick(quick_compiles):
    """Compiling is most of what these tests cost."""


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory, quick_environment):
    """Four NVFP4 steps of a tiny Llama over bytes, by the command itself; a sample is drawn at the end."""
    from halfbyte import data, models
    from halfbyte.io import dataclass_json
    from halfbyte.train import CheckpointConfig, LogConfig, OptimizerConfig, TrainConfig, ValidationConfig

    folder = tmp_path_factory.mktemp("tiny")
    rng = random.Random(0)
    for name in ("laws", "news"):
        text = "\n".join(" ".join(rng.choices(WORDS, k=30)) for _ in range(40))
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    data.prepare(
        [folder / "laws.txt", folder / "news.txt"],
        tokenizer="bytes",
        out=folder / "data",
        seq_len=32,
        val_fraction=0.2,
        workers=1,
    )
    model = models.LlamaConfig(
        name="tiny", vocab_size=272, embed=32, mlp=64, layers=1, heads=2, kv_heads=1, head_dim=16, max_seq=64
    )
    config = TrainConfig(
        name="tiny",
        model=model,
        policy="mlp/down",  # one linear: what is quantized is most of what every command compiles
        data=str(folder / "data"),
        steps=4,
        batch=8,
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup=1),
        validation=ValidationConfig(batches=0),
        checkpoint=CheckpointConfig(every=2),
        log=LogConfig(tensorboard=False),
    )
    dataclass_json.save_config(config, folder / "config.json")
    command = ["train", "--config", str(folder / "config.json"), "--run-dir", str(folder / "run")]
    code = "import sys; from halfbyte.cli.main import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, **quick_environment, "HALFBYTE_API_TOKEN": SECRET}
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "sample, after 'The': " in done.stdout
    (folder / "stdout.txt").write_text(done.stdout, encoding="utf-8")
    assert SECRET not in done.stdout + done.stderr
    return folder / "run"
