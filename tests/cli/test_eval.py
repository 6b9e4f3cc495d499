"""`halfbyte eval` as typed. Oracle for the validation split: what the trainer itself measured at the end of the run."""

import json
import lzma
import math

import pytest

from halfbyte.cli.main import main
from halfbyte.train import read_rows

pytestmark = pytest.mark.usefixtures("one_device")

TASKS = {
    "arc.jsonl": {"query": "Question: what is law?", "choices": ["peace", "war", "tax", "a year"], "gold": 2},
    "piqa.jsonl": {"query": "To pay a tax", "choices": ["go to war", "go to the state"], "gold": 1},
    "winogrande.jsonl": {"context_options": ["we and the", "we or the"], "continuation": "state.", "gold": 0},
    "lambada.jsonl": {"context": "the people of the", "continuation": " union"},
    "blimp.jsonl": {"sentence_good": "we shall", "sentence_bad": "shall we not", "linguistics_term": "order"},
}


def evaluate(capfd, *flags):
    code = main(["eval", *map(str, flags), "--json"])
    out, err = capfd.readouterr()
    return code, json.loads(out) if out else {}, err


@pytest.fixture
def task_folder(tmp_path):
    for name, record in TASKS.items():
        with lzma.open(tmp_path / f"{name}.xz", "wt") as file:
            file.write((json.dumps(record) + "\n") * 3)
    (tmp_path / "text.txt").write_text("we shall not tax the people of the union " * 4)
    (tmp_path / "maths.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    return tmp_path


@pytest.mark.slow
def test_the_validation_split_gives_the_loss_of_training(tiny_run, capfd):
    measured = next(row for row in reversed(read_rows(tiny_run / "metrics.jsonl")) if "validation_loss" in row)
    code, found, err = evaluate(capfd, tiny_run, "--batch-tokens", 8 * 32)
    assert code == 0 and "--scales window scores each window alone" in err
    losses = {result["task"]: result["metrics"]["nats_per_token"]["value"] for result in found["results"]}
    expected = {
        name.replace("_loss", ""): value for name, value in measured.items() if name.startswith("validation_loss/")
    }
    assert expected and losses == pytest.approx(expected, rel=1e-3)  # another mesh, other sums
    saved = read_rows(tiny_run / "evaluations.jsonl")
    assert [row["task"] for row in saved[-len(losses) :]] == list(losses)
    assert saved[-1]["step"] == 4 and saved[-1]["recipe"] == "nvfp4"


def test_the_error_of_the_validation_split_is_over_windows(tiny_run, capfd):
    """One window a batch, or eight: over batches it would differ by a factor."""
    found = []
    for flags in (("--scales", "window"), ("--batch-tokens", 8 * 32)):
        code, data, err = evaluate(capfd, tiny_run, "--recipe", "bf16", "--limit", 6, "--no-save", *flags)
        assert code == 0 and data["results"][0]["examples"] == 6
        assert "scores each window alone" not in err  # nothing is quantized
        found.append(data["results"][0]["metrics"]["nats_per_token"])
    assert found[0] == {key: pytest.approx(value, rel=2e-3) for key, value in found[1].items()}  # bf16 activations


def test_every_kind_of_task(tiny_run, task_folder, capfd):
    flags = ("--recipe", "bf16", "--batch-tokens", 256, "--no-save")
    code, found, err = evaluate(capfd, tiny_run, task_folder, *flags)
    assert code == 0
    assert "passed over: maths.jsonl, line 1: fields question, answer are no task" in err
    results = {result["task"]: result for result in found["results"]}
    assert {name: result["kind"] for name, result in results.items()} == {
        "arc": "choice", "blimp": "pair", "lambada": "word", "piqa": "choice", "text": "text", "winogrande": "schema",
    }  # fmt: skip
    assert results["arc"]["chance"] == 0.25 and results["arc"]["examples"] == 3
    assert set(results["piqa"]["metrics"]) == {"acc", "acc_norm"}
    assert set(results["winogrande"]["metrics"]) == {"acc"}
    text = results["text"]["metrics"]
    # one byte a token
    assert text["bits_per_byte"]["value"] == pytest.approx(text["nats_per_token"]["value"] / math.log(2))
    assert results["text"]["tokens"] == 4 * 41
    assert all(name in err for name in TASK_HEADS)


TASK_HEADS = ("acc_norm", "chance", "nats/token", "bits/byte")


@pytest.mark.slow
def test_a_malformed_task_is_named_before_anything_is_scored(tiny_run, task_folder, capfd):
    (task_folder / "bad.jsonl").write_text(json.dumps(TASKS["piqa.jsonl"]) + '\n{"query": 3}\n')
    before = (tiny_run / "evaluations.jsonl").read_bytes() if (tiny_run / "evaluations.jsonl").exists() else b""
    assert main(["eval", str(tiny_run), str(task_folder / "lambada.jsonl.xz"), str(task_folder / "bad.jsonl")]) == 2
    assert "bad.jsonl, line 2: 'query' is 3" in " ".join(capfd.readouterr().err.split())
    after = (tiny_run / "evaluations.jsonl").read_bytes() if (tiny_run / "evaluations.jsonl").exists() else b""
    assert before == after


@pytest.mark.slow(fast_cases=["flags0-fields question, answer are no task"])
@pytest.mark.parametrize(
    "flags, message",
    [
        (["maths.jsonl"], "fields question, answer are no task"),
        (["none.jsonl"], "no such file or directory"),
        (["text.txt", "--seq", "65"], "max_seq 64"),
        (["text.txt", "--stride", "33"], "stride 33: it lies between 1 and the window of 32"),
        (["text.txt", "--limit", "-1"], "--limit must be 0"),
    ],
)
def test_bad_input_exits_2(tiny_run, task_folder, capfd, monkeypatch, flags, message):
    monkeypatch.chdir(task_folder)
    assert main(["eval", str(tiny_run), *flags]) == 2
    assert message in " ".join(capfd.readouterr().err.split())


def test_no_secret_of_the_environment_is_kept_in_a_run(tiny_run):
    """The run was made with a token in its environment (conftest): no file, and no name of one, holds it."""
    files = [path for path in tiny_run.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if b"hunter2" in path.read_bytes() or "hunter2" in path.name] == []
