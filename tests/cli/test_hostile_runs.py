"""A run directory from elsewhere, changed or made to harm, under every command that reads one. Oracle: what was done to
it, exit code 2, and a file that a program inside it would have made."""

import dataclasses
import faulthandler
import hashlib
import json
import os
import resource
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import tensorstore

from halfbyte import data
from halfbyte.checkpoint.checkpoint_record import write_file_list
from halfbyte.cli.flag_parsing import config_from_file
from halfbyte.cli.main import main
from halfbyte.hf.hf_folder import MAX_TENSORS
from halfbyte.train import run_directory
from halfbyte.train.run_directory import open_run_directory
from halfbyte.train.run_identity import load_identity, save_identity

COMMANDS = {
    "verify": ("verify", "RUN"),
    "generate": ("generate", "RUN", "--max-tokens", "2"),
    "eval": ("eval", "RUN", "--limit", "1"),
    "export": ("export", "RUN", "--out", "OUT"),
    "nvfp4 export": ("export", "RUN", "--out", "OUT", "--format", "modelopt"),
    "inspect": ("inspect", "RUN", "--batches", "1"),
    "compare": ("compare", "RUN", "RUN", "--out", ""),
    "train": ("train", "--run-dir", "RUN"),
    "begin": ("train", "--init-from", "RUN", "--data", "synthetic", "--run-dir", "OUT"),
    "config": ("train", "--config", "RUN/config.json", "--run-dir", "OUT"),
    "study": ("parity", "RUN/config.json", "--out", "OUT"),
}
OTHERS = ("verify", "compare", "train", "begin", "config", "study")
READERS = tuple(name for name in COMMANDS if name not in OTHERS)
MOST_MEMORY, MOST_SECONDS = 8 << 30, 1200
pytestmark = [
    pytest.mark.usefixtures("one_device"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def bounded():
    """Memory, and time of the processor, that no refusal comes near; a hang ends the test run with its stack."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    limits = {
        resource.RLIMIT_AS: pages * resource.getpagesize() + MOST_MEMORY,
        resource.RLIMIT_CPU: int(used) + MOST_SECONDS,
    }
    before = {kind: resource.getrlimit(kind) for kind in limits}
    for kind, most in limits.items():
        resource.setrlimit(kind, (most, before[kind][1]))
    faulthandler.dump_traceback_later(3 * MOST_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    for kind, old in before.items():
        resource.setrlimit(kind, old)


@pytest.fixture
def run(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_run, tmp_path / "run")
    return tmp_path / "run"


def codes(run, names=tuple(COMMANDS)):
    """Exit codes of commands, and that nothing was executed or made."""
    out = str(run.parent / "out")
    found = {name: main([w.replace("RUN", str(run)).replace("OUT", out) for w in COMMANDS[name]]) for name in names}
    assert not (run.parent / "executed").exists() and not (run.parent / "out").exists()
    return found


def all_two(names=tuple(COMMANDS)):
    return dict.fromkeys(names, 2)


def edit(run, name, change):
    path = run / name
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def reseal(run):
    """As somebody would who knows the format: seals are no signatures."""
    identity = load_identity(run)
    files = {name: hashlib.sha256((run / name).read_bytes()).hexdigest() for name in identity.files}
    save_identity(run, dataclasses.replace(identity, files=files))


@pytest.mark.slow(fast_cases=["False-False"])
@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("pinned", [True, False])
def test_a_recipe_beside_the_run_is_not_executed(run, sealed, pinned, capsys):
    program = run.parent / "theirs.py"
    program.write_text(f"open({str(run.parent / 'executed')!r}, 'w')\nimport halfbyte\nx = halfbyte.recipe('nvfp4')\n")
    digest = f"@{hashlib.sha256(program.read_bytes()).hexdigest()[:16]}" if pinned else ""
    edit(run, "config.json", lambda values: values.update(recipe=f"{program}:x{digest}"))
    reseal(run) if sealed else (run / "run.json").unlink()
    names = [name for name in COMMANDS if name not in ("verify", "compare", "begin", "study")]  # they need no recipe
    assert codes(run, names) == all_two(names)
    assert codes(run, ["verify"]) == {"verify": 3 if pinned else 2}  # its checkpoints are of another config
    capsys.readouterr()


def test_a_cache_of_compiled_programs_in_the_run_is_not_looked_at(run):
    (run / "compiled").mkdir()
    (run / "compiled" / "jit_step-0-cache").write_bytes(b"machine code")
    edit(run, "config.json", lambda values: values.update(compile_cache=str(run / "compiled")))
    reseal(run)
    assert open_run_directory(run).config.compile_cache == ""


CHUNKS = tensorstore.ChunkLayout(chunk_shape=[1 << 20, 32])
PLACES = ("tokenizer.json", "data.json", "metrics.jsonl", "run.json", "checkpoints/4/params/manifest.ocdbt")


@pytest.mark.slow(fast_cases=["link-data.json", "link-run.json", "link-checkpoints/4/params/manifest.ocdbt"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_pipes_and_links_are_refused_wherever_they_lie(run, place, kind, capsys):
    path = run / place
    shutil.move(path, run.parent / "away")
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(run.parent / "away")
    assert codes(run) == all_two()
    said = " ".join(capsys.readouterr().err.split())
    assert "symbolic link" in said if kind == "link" else "neither a file nor a directory" in said


@pytest.mark.slow
def test_other_files_than_the_run_wrote_are_refused(run, capsys):
    """config.json, data.json, two ids of the tokenizer exchanged; then the same in a run that no seal covers."""
    for name, change in {
        "config.json": lambda values: values["model"].update(norm_eps=0.1),
        "data.json": lambda values: values.update(seq=16),
        "tokenizer.json": lambda values: values["model"]["vocab"].update(e=values["model"]["vocab"]["t"]),
    }.items():
        before = (run / name).read_bytes()
        edit(run, name, change)
        assert codes(run) == {**all_two(), "verify": 3}
        (run / name).write_bytes(before)
    edit(run, "config.json", lambda values: values["model"].update(norm_eps=0.1))
    (run / "run.json").unlink()
    assert codes(run, READERS) == all_two(READERS)  # the checkpoint's own record is of another model
    assert "of another model than config.json says" in " ".join(capsys.readouterr().err.split())


def test_other_data_at_the_same_place_is_refused(run, capsys):
    (run.parent / "other.txt").write_text("other words, other letters, another text\n" * 200)
    data.prepare([run.parent / "other.txt"], tokenizer="bytes", out=run.parent / "other", seq_len=32, val_fraction=0.2,
                 workers=1)  # fmt: skip
    edit(run, "config.json", lambda values: values.update(data=str(run.parent / "other")))
    reseal(run)
    names = ["eval", "inspect", "train"]
    assert codes(run, names) == all_two(names) and codes(run, ["verify"]) == {"verify": 3}
    assert "something else than this run was trained on" in " ".join(capsys.readouterr().err.split())


def test_a_tokenizer_that_explodes_is_refused_before_it_reads_a_text(run, capsys):
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    edit(
        run,
        "tokenizer.json",
        lambda values: values.update(normalizer={"type": "Sequence", "normalizers": [double] * 40}),
    )
    reseal(run)
    names = [name for name in READERS if name != "inspect"]
    assert codes(run, names) == all_two(names)
    assert "times as long" in capsys.readouterr().err


@pytest.mark.slow
def test_names_cannot_speak_to_the_terminal(run, capsys):
    edit(run, "config.json", lambda values: values["model"].update(name="a\x1b]0;b\x07\x1b[2J"))
    reseal(run)
    odd = run.with_name("c\x1b[31md")
    run.rename(odd)
    for name in ("generate", "compare", "verify"):
        words = {"RUN": str(odd), "OUT": "out"}
        main([words.get(word, word) for word in COMMANDS[name]])
        shown = "".join("".join(capsys.readouterr()).split())  # a long path is folded
        assert "\\x1b" in shown and "\x1b" not in shown


def header(entries):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.slow
def test_giants_are_refused(run, capsys):
    """A header of many empty tensors, one that claims more than there is, and a config of two million bytes."""
    (run / "imported.json").write_text("{}")
    (run / "huggingface").mkdir()
    shutil.copy(run / "config.json", run / "huggingface")
    many = {str(number): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(MAX_TENSORS + 1)}
    for content in (header(many), (90_000_000).to_bytes(8, "little") + b"{}"):
        (run / "huggingface" / "model.safetensors").write_bytes(content)
        assert codes(run, READERS) == all_two(READERS)
    (run / "config.json").write_text(" " * (2 << 20) + (run / "config.json").read_text())
    assert codes(run) == {**all_two(), "verify": 3}
    capsys.readouterr()


def forge_record(run, change):
    """The record of the newest checkpoint, `change`d, under its CRC, and the list of its files written again."""
    step = run / "checkpoints" / "4"
    facts = json.loads((step / "_CHECKPOINT_METADATA").read_text())
    record = json.loads(facts["custom_metadata"]["record"])
    change(record)
    text = json.dumps(record)
    facts["custom_metadata"] = {"record": text, "crc32": zlib.crc32(text.encode())}
    (step / "_CHECKPOINT_METADATA").write_text(json.dumps(facts))
    write_file_list(step)


def lay_out(run, item, name, shape):
    """An array of this shape in the place of a stored one, as the array database has it: no byte of it is written."""
    where = {"driver": "ocdbt", "base": f"file://{run}/checkpoints/4/{item}/", "path": f"{name.replace('/', '.')}/"}
    made = {"create": True, "delete_existing": True, "dtype": "float32", "shape": shape}
    tensorstore.open({"driver": "zarr3", "kvstore": where}, **made, chunk_layout=CHUNKS).result()


def test_arrays_that_are_claimed_and_not_there_are_refused(run, capsys):
    """A petabyte in the record and in the array database; then a model of as many weights in config.json as well."""
    checkpoint = run / "checkpoints" / "4"
    shutil.rmtree(run / "checkpoints" / "2", ignore_errors=True)
    kept = {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    name, shape = "embed", [1 << 40, 32]
    lay_out(run, "params", name, shape)
    forge_record(run, lambda record: record["leaves"]["params"][name].update(shape=shape))
    names = (*READERS, "train", "begin")
    assert codes(run, [*names, "verify"]) == {**all_two(names), "verify": 3}
    shutil.rmtree(checkpoint)
    for path, content in kept.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def grown(record):
        record["leaves"]["params"][name].update(shape=[1 << 30, 32])
        record["extra"]["config"]["model"].update(vocab_size=1 << 30)

    lay_out(run, "params", name, [1 << 30, 32])
    forge_record(run, grown)
    edit(run, "config.json", lambda values: values["model"].update(vocab_size=1 << 30))
    reseal(run)
    assert codes(run, [*names, "verify"]) == {**all_two(names), "verify": 3}
    capsys.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data.json", "config.json", "metrics.jsonl"])
def test_lengths_that_nobody_could_hold_are_refused(run, name, capsys):
    """Rows of a million million tokens, batches of two thousand million rows, a file of metrics that never ends."""
    if name == "data.json":
        edit(run, name, lambda values: values.update(seq=(1 << 31) - 1))
        edit(run, "config.json", lambda values: values["model"].update(max_seq=(1 << 31) - 1))
        forge_record(run, lambda record: record["extra"]["config"]["model"].update(max_seq=(1 << 31) - 1))
        names = ("eval", "generate")
    elif name == "config.json":
        edit(run, name, lambda values: values.update(batch=(1 << 31) - 8))
        forge_record(run, lambda record: record["extra"]["config"].update(batch=(1 << 31) - 8))
        names = ("inspect", "train")
    else:
        os.truncate(run / name, 1 << 40)
        names = ("compare", "train")
        assert codes(run, ["verify"]) == {"verify": 3}
    reseal(run)
    assert codes(run, names) == all_two(names)
    capsys.readouterr()


def test_metrics_that_are_no_numbers_are_said(run, capsys):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for change in ({"tokens": None}, {"tokens": {}}, {"tokens": "nan"}, {"tokens": 10**400}, {"tokens": -1}):
        (run / "metrics.jsonl").write_text("".join(json.dumps({**row, **change}) + "\n" for row in rows))
        assert codes(run, ["compare"]) == {"compare": 2}
        said = capsys.readouterr().err
        assert "metrics.jsonl" in said and "Traceback" not in said
    odd = {"loss": [], "step_time_s": {}, "mfu": "x", "validation_loss": {}, "input_wait_s": 10**400}
    (run / "metrics.jsonl").write_text("".join(json.dumps({**row, **odd}) + "\n" for row in rows))
    assert codes(run, ["compare"]) == {"compare": 0}
    assert "have a loss that is not finite" in capsys.readouterr().out
    metric = {"task": "x", "metrics": {"acc": {"value": {}, "error": []}}}
    (run / "evaluations.jsonl").write_text(json.dumps(metric) + "\n")
    assert codes(run, ["compare"]) == {"compare": 0}
    edit(run, "config.json", lambda values: values.update(seed=[1]))
    reseal(run)
    assert codes(run, ["compare"]) == {"compare": 2}
    assert "seed must be a whole number" in " ".join(capsys.readouterr().err.split())


def test_imported_weights_are_sealed_and_finite(run, tmp_path, capsys):
    folder, imported = tmp_path / "folder", tmp_path / "imported"
    assert main(["export", str(run), "--out", str(folder), "--dtype", "float32"]) == 0
    assert main(["import", str(folder), "--out", str(imported)]) == 0
    assert main(["verify", str(imported)]) == 0
    shard = imported / "huggingface" / "model.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 0x20
    shard.write_bytes(content)
    assert codes(imported, ["generate", "export", "verify"]) == {"generate": 2, "export": 2, "verify": 3}
    for value in (np.nan, np.inf, 1e30):
        content[-4:] = np.float32(value).tobytes()
        (folder / "model.safetensors").write_bytes(content)
        shutil.rmtree(imported)
        assert main(["import", str(folder), "--out", str(imported)]) == 2 and not imported.exists()
        imported.mkdir()
        assert main(["generate", str(folder)]) == main(["export", str(folder), "--out", str(tmp_path / "no")]) == 2
    assert "too large to be squared" in capsys.readouterr().err


@pytest.mark.slow
def test_what_came_with_an_imported_model_is_compared_before_it_is_taken_along(run, capsys):
    (run / "huggingface").mkdir()
    for name in ("config.json", "chat_template.jinja"):
        (run / "huggingface" / name).write_text("{}")
    identity = load_identity(run)
    digest = hashlib.sha256(b"{}").hexdigest()
    files = {f"huggingface/{name}": digest for name in ("config.json", "chat_template.jinja")}
    save_identity(run, dataclasses.replace(identity, files={**identity.files, **files}))
    (run / "huggingface" / "chat_template.jinja").write_text("{{ theirs }}")
    names = (*READERS, "begin")
    assert codes(run, names) == all_two(names)
    assert "chat_template.jinja is not what this run wrote" in " ".join(capsys.readouterr().err.split())


def test_the_config_of_a_run_is_behind_its_seal_wherever_it_is_named(run, monkeypatch, capsys):
    monkeypatch.setattr(run_directory, "LARGE_FILE_BYTES", 0)
    assert config_from_file("", run / "config.json").steps == 4
    assert "comparing" in capsys.readouterr().err  # what takes a while is said
    (run / "run.json").unlink()
    assert config_from_file("", run / "config.json").steps == 4
    assert "no seal covers config.json" in capsys.readouterr().err


def test_a_run_of_an_earlier_version_is_read_and_said_to_be_unsealed(run, capsys):
    """Its run.json sealed the config alone."""
    identity = load_identity(run)
    text = json.dumps({"run": identity.run, "data": identity.data, "config_sha256": identity.files["config.json"]})
    (run / "run.json").write_text(json.dumps({"run": text, "crc32": zlib.crc32(text.encode())}))
    opened = open_run_directory(run)
    assert opened.unsealed_files() == ["tokenizer.json", "data.json"] and opened.config.steps == 4
    assert "no seal covers tokenizer.json, data.json" in capsys.readouterr().err
    assert main(["verify", str(run)]) == 0
    assert "no seal covers it" in capsys.readouterr().out
    edit(run, "config.json", lambda values: values["model"].update(norm_eps=0.1))
    assert codes(run, READERS) == all_two(READERS)
