"""`halfbyte generate` as typed, on a run that was really trained."""

import io
import json
import shutil
from types import SimpleNamespace

import jax
import pytest

from halfbyte import models
from halfbyte.cli.main import main
from halfbyte.cli.run_summary import sample_text
from halfbyte.data.tokenizer import byte_tokenizer
from halfbyte.distributed import make_mesh
from halfbyte.train import TrainConfig

pytestmark = pytest.mark.usefixtures("one_device")


def generate(capfd, *flags):
    code = main(["generate", *map(str, flags), "--json"])
    out, err = capfd.readouterr()
    return code, json.loads(out) if out else {}, err


@pytest.mark.slow
def test_the_run_generates_under_its_own_recipe(tiny_run, capfd):
    code, found, err = generate(capfd, tiny_run, "--prompt", "the union", "--max-tokens", 8)
    assert code == 0 and (found["step"], found["recipe"]) == (4, "nvfp4")
    (sample,) = found["samples"]
    assert sample["prompt"] == "the union" and (sample["ended"] or len(sample["tokens"]) == 8)
    assert "step 4, nvfp4" in err and "the union" in err


@pytest.mark.slow
def test_text_alone_on_stdout_and_the_same_seed_the_same_text(tiny_run, capfd):
    flags = ["generate", str(tiny_run), "--prompt", "a", "--recipe", "bf16", "--temperature", "1", "--top-p", "0.9"]
    assert main([*flags, "--max-tokens", "8", "--seed", "1", "--samples", "2"]) == 0
    out, err = capfd.readouterr()
    assert "step 4, bf16" in err and "tokens/s" not in out
    code, found, _ = generate(capfd, *flags[1:], "--max-tokens", 8, "--seed", 2)
    (second,) = found["samples"]
    assert code == 0 and out.startswith("a") and out.endswith(f"a{second['text']}\n") and out.count("\n") >= 2


@pytest.mark.slow
def test_the_prompt_from_a_pipe_and_an_older_checkpoint(tiny_run, capfd, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"of law")))
    code, found, _ = generate(capfd, tiny_run, "--prompt", "-", "--recipe", "bf16", "--step", 2, "--max-tokens", 999)
    assert code == 0 and found["step"] == 2
    (sample,) = found["samples"]
    assert sample["prompt"] == "of law"
    assert sample["ended"] or len(sample["tokens"]) == 64 - 7  # as many as fit max_seq


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--step", "3"], "no checkpoint of step 3; it keeps 2, 4"),
        (["--recipe", "nvfp5"], "no recipe named 'nvfp5'; did you mean nvfp4"),
        (["--temperature", "-1"], "temperature must be 0"),
        (["--samples", "0"], "--samples must be 1 or more"),
        (["--prompt", "x" * 100], "more than the model's max_seq 64"),
    ],
)
def test_bad_input_exits_2(tiny_run, capfd, flags, message):
    assert main(["generate", str(tiny_run), *flags]) == 2
    assert message in " ".join(capfd.readouterr().err.split())


def test_directories_that_are_no_run(tmp_path, tiny_run, capfd):
    assert main(["generate", str(tmp_path / "none")]) == 2
    assert "is not a run: there is no such directory" in " ".join(capfd.readouterr().err.split())
    (tmp_path / "file.txt").write_text("x")
    assert main(["generate", str(tmp_path / "file.txt")]) == 2
    assert "is a file, and a run is a directory" in " ".join(capfd.readouterr().err.split())
    assert main(["generate", str(tmp_path)]) == 2
    assert "it holds no config.json" in " ".join(capfd.readouterr().err.split())
    shutil.copy(tiny_run / "config.json", tmp_path)
    assert main(["generate", str(tmp_path)]) == 2
    assert "has no checkpoint yet" in " ".join(capfd.readouterr().err.split())


def test_a_damaged_checkpoint_is_named_and_the_older_one_used(tiny_run, tmp_path, capfd):
    copy = shutil.copytree(tiny_run, tmp_path / "run")
    files = [path for path in (copy / "checkpoints" / "4" / "params").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    damaged = bytearray(largest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    largest.write_bytes(damaged)
    code, found, err = generate(capfd, copy, "--recipe", "bf16", "--max-tokens", 1)
    assert code == 0 and found["step"] == 2 and "DAMAGED CHECKPOINT" in err
    assert (copy / "checkpoints" / "4").exists()  # reading moves nothing
    assert main(["generate", str(copy), "--step", "4"]) == 2
    assert "is damaged" in " ".join(capfd.readouterr().err.split())


@pytest.mark.slow
def test_the_data_may_be_gone(tiny_run, tmp_path, capfd, monkeypatch):
    """The run directory holds the tokenizer; the data set is not opened."""
    monkeypatch.setattr("halfbyte.train.batch_source.open_batch_source", lambda config: pytest.fail("opened the data"))
    code, _, _ = generate(capfd, tiny_run, "--recipe", "bf16", "--max-tokens", 1)
    assert code == 0


def test_the_sample_at_the_end_of_training_on_a_mesh(one_device):
    """Weights as training leaves them, over two devices; a model too short for sixty tokens gets fewer."""
    config = TrainConfig(
        name="tiny",
        model=models.LlamaConfig(
            name="tiny", vocab_size=288, embed=32, mlp=64, layers=1, heads=2, kv_heads=2, head_dim=16, max_seq=16
        ),
    )
    mesh = make_mesh({"fsdp": 2}, one_device[:2])
    shardings = models.param_shardings(config.model, mesh)
    params = jax.jit(lambda key: models.init(config.model, key), out_shardings=shardings)(jax.random.key(0))
    dataset = SimpleNamespace(tokenizer=byte_tokenizer, seq_len=16)
    prompt, text = sample_text(config, params, dataset)
    assert prompt == "The" and len(text) <= 12
