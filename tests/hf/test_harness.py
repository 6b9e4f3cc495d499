"""Oracle: lm-evaluation-harness, which makes requests and metrics of its own from the same files; with the scores of
`halfbyte eval` it must agree to the last printed digit."""

import json
import random

import jax
import pytest

from halfbyte import models
from halfbyte.cli.main import main
from halfbyte.data.tokenizer import byte_tokenizer
from halfbyte.hf import ExportModel, export_model

WORDS = "the a of union state people congress law and to we shall not year nation peace war tax".split()
CONFIG = models.LlamaConfig(
    name="tiny", vocab_size=288, embed=32, mlp=64, layers=1, heads=2, kv_heads=1, head_dim=16, max_seq=128,
    rope_theta=10_000.0,
)  # fmt: skip
TASKS = {
    "words": {"output_type": "loglikelihood", "doc_to_text": "{{context}}", "doc_to_target": "{{continuation}}",
              "target_delimiter": "", "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}]},
    "pairs": {"output_type": "multiple_choice", "doc_to_text": "", "doc_to_target": 0, "target_delimiter": "",
              "doc_to_choice": "{{[sentence_good, sentence_bad]}}", "metric_list": [{"metric": "acc"}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def lm_eval():
    return pytest.importorskip("lm_eval", reason="needs the extra `harness`")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model whose head prefers some bytes, as an export, and two task files of LAMBADA's and BLiMP's kind."""
    out = tmp_path_factory.mktemp("harness")
    params = jax.jit(lambda key: models.init(CONFIG, key))(jax.random.key(0))
    params["head"] = params["head"] * 4.0
    export_model(ExportModel(CONFIG, params, byte_tokenizer()), out / "model", to="hf", dtype="float32")
    rng = random.Random(0)

    def sentence(count):
        return " ".join(rng.choices(WORDS, k=count))

    words = [{"context": sentence(9), "continuation": " " + sentence(1)} for _ in range(40)]
    pairs = [{"sentence_good": sentence(6), "sentence_bad": sentence(6)} for _ in range(40)]
    for name, lines in (("words", words), ("pairs", pairs)):
        (out / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return out


def test_scores_agree_to_the_last_printed_digit(lm_eval, folder, capfd, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    from lm_eval.tasks import TaskManager

    from halfbyte.hf.lm_eval_harness import HalfbyteLM

    where = {name: str(folder / f"{name}.jsonl") for name in TASKS}
    code = main(["eval", str(folder / "model"), *where.values(), "--compute-dtype", "float32", "--json"])
    ours = {result["task"]: result["metrics"] for result in json.loads(capfd.readouterr().out)["results"]}
    assert code == 0
    tasks = [
        {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": where[name]}},
         "test_split": "test", **config}
        for name, config in TASKS.items()
    ]  # fmt: skip
    model = HalfbyteLM(run=str(folder / "model"), compute_dtype="float32")
    ours_alone = TaskManager(include_defaults=False)  # it would read all 14,000 files of its own tasks
    theirs = lm_eval.simple_evaluate(model=model, tasks=tasks, task_manager=ours_alone, bootstrap_iters=0)["results"]
    assert f"{theirs['words']['perplexity,none']:.4f}" == f"{ours['words']['ppl']['value']:.4f}"
    assert f"{theirs['words']['acc,none']:.4f}" == f"{ours['words']['acc']['value']:.4f}"
    assert f"{theirs['pairs']['acc,none']:.4f}" == f"{ours['pairs']['acc']['value']:.4f}"


def test_texts_and_generation(lm_eval, folder):
    from types import SimpleNamespace

    from halfbyte.hf.lm_eval_harness import HalfbyteLM

    model = HalfbyteLM(run=str(folder / "model"), compute_dtype="float32", seq=32)
    text = "the people of the union shall not tax the peace"
    (whole,) = model.loglikelihood_rolling([SimpleNamespace(args=(text,))])
    parts = model.loglikelihood([SimpleNamespace(args=("", text[:20])), SimpleNamespace(args=(text[:20], text[20:31]))])
    assert whole < parts[0][0] + parts[1][0] < 0
    asked = {"until": ["\n"], "max_gen_toks": 4}
    (written,) = model.generate_until([SimpleNamespace(args=("the people", asked))])
    assert "\n" not in written
    with pytest.raises(ValueError, match="greedily"):
        model.generate_until([SimpleNamespace(args=("the", {"do_sample": True}))])
