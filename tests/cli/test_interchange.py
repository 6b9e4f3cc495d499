"""import, export, generate, eval and train --init-from as a person types them, on a run of four real steps.

Oracles: the run itself (its text, its weights), `transformers` (its text from the exported folder)."""

import json
import shutil

import numpy as np
import pytest

from halfbyte.cli.main import main
from halfbyte.hf import HfFolder
from halfbyte.hf.model_loading import check_tokenizers

pytestmark = pytest.mark.usefixtures("one_device")

PROMPT = "the state of the"


def command(capfd, *words):
    """(exit code, JSON, stderr) of one command."""
    capfd.readouterr()
    code = main([*map(str, words), "--json"])
    out, err = capfd.readouterr()
    return code, json.loads(out) if out else None, err


def tensors_of(folder):
    with HfFolder(folder) as opened:
        return {name: opened.read(name) for name in opened.entries}


def text_of(capfd, where, *flags):
    code, found, err = command(capfd, "generate", where, "--prompt", PROMPT, "--max-tokens", 12, *flags)
    assert code == 0, err
    return found["samples"][0]["text"]


@pytest.fixture(scope="module")
def exports(tiny_run, tmp_path_factory):
    """The run in every format."""
    folder = tmp_path_factory.mktemp("exports")
    for name in ("hf", "compressed-tensors", "modelopt"):
        assert main(["export", str(tiny_run), "--format", name, "--out", str(folder / name)]) == 0
    return folder


@pytest.mark.slow
def test_all_formats_write_the_same_text(tiny_run, exports, capfd):
    """Here and in `transformers`. float32 activations: no near tie of the first tokens is decided by bfloat16."""
    plain = ("--compute-dtype", "float32")
    texts = {name: text_of(capfd, tiny_run, "--recipe", name, *plain) for name in ("bf16", "bf16+nvfp4_weights")}
    assert text_of(capfd, exports / "hf", *plain) == texts["bf16"]
    assert text_of(capfd, exports / "compressed-tensors", *plain) == texts["bf16+nvfp4_weights"]
    two = [tensors_of(exports / name) for name in ("compressed-tensors", "modelopt")]
    down = "model.layers.0.mlp.down_proj"
    np.testing.assert_array_equal(two[0][f"{down}.weight_packed"], two[1][f"{down}.weight"])
    transformers = pytest.importorskip("transformers", reason="needs the extra `interop`")
    pytest.importorskip("compressed_tensors", reason="needs the extra `interop`")
    for name, text in (("hf", texts["bf16"]), ("compressed-tensors", texts["bf16+nvfp4_weights"])):
        tokenizer = transformers.AutoTokenizer.from_pretrained(exports / name)
        kind = {"dtype": "float32"} if name == "hf" else {}
        model = transformers.AutoModelForCausalLM.from_pretrained(exports / name, **kind)
        ids = tokenizer(PROMPT, return_tensors="pt")
        made = model.generate(**ids, max_new_tokens=12)[0, ids["input_ids"].shape[1] :]
        assert tokenizer.decode(made, skip_special_tokens=True) == text


@pytest.mark.slow
def test_import_then_export_is_the_same_folder(exports, tmp_path, capfd):
    code, found, err = command(capfd, "import", exports / "hf", "--out", tmp_path / "run")
    assert code == 0 and found["family"] == "Llama", err
    code, found, _ = command(capfd, "export", tmp_path / "run", "--out", tmp_path / "again")
    assert code == 0
    for file in sorted(path.name for path in (exports / "hf").iterdir()):
        ours, theirs = tmp_path / "again" / file, exports / "hf" / file
        if file.endswith(".json"):
            assert json.loads(ours.read_text()) == json.loads(theirs.read_text()), file
        else:
            assert ours.read_bytes() == theirs.read_bytes(), file
    assert text_of(capfd, tmp_path / "run", "--max-tokens", 2)


@pytest.mark.slow
def test_eval_takes_runs_and_folders_alike(tiny_run, exports, tmp_path, capfd):
    lines = [{"sentence_good": "the people of the union", "sentence_bad": "union the of people the"}] * 3
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = (tmp_path / "pairs.jsonl", "--no-save", "--recipe", "bf16", "--seq", 32)
    scores = [command(capfd, "eval", where, *flags)[1]["results"] for where in (tiny_run, exports / "hf")]
    assert scores[0] == scores[1] or scores[0][0]["metrics"]["acc"] == scores[1][0]["metrics"]["acc"]
    assert not (exports / "hf" / "evaluations.jsonl").exists()
    code, _, err = command(capfd, "eval", exports / "hf")
    assert code == 2 and "name files to score" in " ".join(err.split())


def test_training_goes_on_from_an_import(tiny_run, exports, tmp_path, capfd):
    """The first loss is the imported model's on that batch: as the run's own step 0 under the same weights."""
    config = json.loads((tiny_run / "config.json").read_text())
    flags = ("--data", config["data"], "--steps", 2, "--batch", 8, "--recipe", "bf16")
    more = ("--no-sample", "--log.no-tensorboard", "--checkpoint.every", 1, "--optimizer.warmup", 1)
    more += ("--optimizer.schedule", "constant")  # a run that is prolonged is the same program
    code, _, err = command(capfd, "train", "--init-from", exports / "hf", "--run-dir", tmp_path / "run", *flags, *more)
    assert code == 0, err
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert (tmp_path / "run" / "huggingface" / "tokenizer.json").is_file()
    expected = imported_loss(exports / "hf", config["data"])
    assert first["loss"] == pytest.approx(expected, rel=1e-5)  # sums in another order
    code, found, err = command(capfd, "train", "--run-dir", tmp_path / "run", "--steps", 3, "--no-sample")
    assert code == 0 and found["step"] == 3, err


def imported_loss(folder, data_dir):
    """Mean negative log-likelihood of the model in `folder` on the run's first batch."""
    import jax
    import jax.numpy as jnp

    from halfbyte import data, models
    from halfbyte.hf import config_from_hf, load_params

    with data.loader(data.open_dataset(data_dir), batch=8, seed=0) as loader:
        batch = {name: jnp.asarray(value, jnp.int32) for name, value in next(loader).items()}
    with HfFolder(folder) as opened:
        cfg = config_from_hf(opened.config)
        params = load_params(opened, cfg)
    return float(jax.jit(lambda p, b: models.loss(cfg, p, b)[0])(params, batch))


def test_what_cannot_start_says_what_to_do(tiny_run, exports, tmp_path, capfd):
    code, _, err = command(capfd, "train", "--init-from", exports / "hf", "--run-dir", tmp_path / "a")
    assert code == 2 and "give --data DIR" in " ".join(err.split()) and not (tmp_path / "a").exists()
    with pytest.raises(ValueError, match="another tokenizer"):
        check_tokenizers(exports / "hf", "demo")
    assert main(["import", str(exports / "hf"), "--out", str(tmp_path / "run")]) == 0
    code, _, err = command(capfd, "train", "--run-dir", tmp_path / "run")
    assert code == 2 and "holds an imported model" in " ".join(err.split())
    code, _, err = command(capfd, "export", tmp_path / "run", "--format", "modelopt", "--out", tmp_path / "c")
    assert code == 2 and "--recipe nvfp4" in err
    code, _, err = command(capfd, "export", tiny_run, "--out", exports / "hf")
    assert code == 2 and "--overwrite" in err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    code, _, err = command(capfd, "export", tiny_run, "--out", tmp_path / "mine", "--overwrite")
    assert code == 2 and (tmp_path / "mine" / "notes.txt").read_text() == "keep"
    shutil.copytree(exports / "hf", tmp_path / "tuned")  # an export, and what somebody has put beside it
    (tmp_path / "tuned" / "notes.txt").write_text("keep")
    code, _, err = command(capfd, "export", tiny_run, "--out", tmp_path / "tuned", "--overwrite")
    assert code == 2 and "notes.txt, which no export writes" in " ".join(err.split())
    assert (tmp_path / "tuned" / "notes.txt").read_text() == "keep"
    code, _, err = command(capfd, "export", tiny_run, "--out", tmp_path / "run" / "huggingface", "--overwrite")
    assert code == 2 and "is part of the run" in " ".join(err.split())


@pytest.mark.slow
def test_export_warns_where_a_fused_group_differs_and_overwrites_when_told(tiny_run, exports, tmp_path, capfd):
    shutil.copytree(exports / "modelopt", tmp_path / "out")
    code, found, err = command(
        capfd, "export", tiny_run, "--format", "modelopt", "--policy", "mlp", "--out", tmp_path / "out", "--overwrite"
    )
    assert code == 0 and found["quantized_linears"] == 3 and found["fused_groups_that_differ"] == 1
    tensors = tensors_of(tmp_path / "out")
    gate, up = (tensors[f"model.layers.0.mlp.{name}_proj.weight_scale_2"][0] for name in ("gate", "up"))
    ratio = max(gate, up) / min(gate, up)
    assert found["largest_ratio"] == pytest.approx(ratio, rel=1e-6)
    assert f"by up to {ratio:.3f}x" in err


def test_activation_scales_are_found_on_text(tiny_run, tmp_path, capfd):
    (tmp_path / "text.txt").write_text("the people of the union shall not tax the peace of the nation. " * 40)
    code, found, err = command(
        capfd, "export", tiny_run, "--format", "compressed-tensors", "--out", tmp_path / "out",
        "--policy", "mlp", "--calibrate", tmp_path / "text.txt", "--batches", 2,
    )  # fmt: skip
    assert code == 0 and found["activation_scales"], err
    tensors = tensors_of(tmp_path / "out")
    scales = {name: tensors[f"model.layers.0.mlp.{name}_proj.input_global_scale"] for name in ("gate", "up", "down")}
    assert all(value.shape == (1,) and np.isfinite(value) and value > 0 for value in scales.values())
    assert scales["gate"] == scales["up"] != scales["down"]  # one input, two linears
    assert text_of(capfd, tmp_path / "out") is not None
