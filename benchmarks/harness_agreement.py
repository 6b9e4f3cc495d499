"""The same examples scored by `halfbyte eval` and by lm-evaluation-harness, side by side.

    python benchmarks/harness_agreement.py MODEL lambada.jsonl blimp.jsonl          a run or a Hugging Face folder
    python benchmarks/harness_agreement.py FOLDER lambada.jsonl blimp.jsonl --hf    and by the harness's own `hf` model

Files hold last words ({"context", "continuation"}) or minimal pairs ({"sentence_good", "sentence_bad"}), as `eval`
takes them. All in float32. Prints one line a metric and exits with 3 if a printed digit differs between `eval` and the
harness with our model in it. The harness's own `hf` model runs through transformers, with bos before every text.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from halfbyte.devices.platform import settle_platform

settle_platform(os.environ)

KINDS = {
    "context": {
        "output_type": "loglikelihood", "doc_to_text": "{{context}}", "doc_to_target": "{{continuation}}",
        "target_delimiter": "", "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "sentence_good": {
        "output_type": "multiple_choice", "doc_to_text": "", "doc_to_target": 0, "target_delimiter": "",
        "doc_to_choice": "{{[sentence_good, sentence_bad]}}", "metric_list": [{"metric": "acc"}],
    },
}  # fmt: skip
METRICS = {"ppl": "perplexity,none", "acc": "acc,none"}


def task_of(file: Path) -> dict[str, Any]:
    """The harness's description of a task file."""
    first = json.loads(file.read_text(encoding="utf-8").splitlines()[0])
    kind = next(config for field, config in KINDS.items() if field in first)
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
    return {"task": file.stem, **data, **kind}


def scores_of_eval(model: str, files: list[Path], batch_tokens: int) -> dict[str, dict[str, float]]:
    from halfbyte.cli.main import main

    out = io.StringIO()
    flags = ["--recipe", "bf16", "--compute-dtype", "float32", "--no-save", "--json"]
    words = ["eval", model, *map(str, files), "--batch-tokens", str(batch_tokens), *flags]
    with contextlib.redirect_stdout(out):
        if main(words):
            raise SystemExit("halfbyte eval failed")
    results = json.loads(out.getvalue())["results"]
    return {r["task"]: {name: m["value"] for name, m in r["metrics"].items()} for r in results}


def scores_of_harness(model: Any, files: list[Path]) -> dict[str, dict[str, float]]:
    import lm_eval

    found = lm_eval.simple_evaluate(model=model, tasks=[task_of(file) for file in files], bootstrap_iters=0)["results"]

    def named(values: dict[str, float]) -> dict[str, float]:
        return {ours: values[name] for ours, name in METRICS.items() if name in values}

    return {task: named(values) for task, values in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--hf", action="store_true")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"HF_DATASETS_CACHE": cache, "HF_HUB_OFFLINE": "1"}
        from halfbyte.interchange.harness import HalfbyteLM

        columns = {"eval": scores_of_eval(args.model, args.files, args.batch_tokens)}
        ours = HalfbyteLM(run=args.model, recipe="bf16", compute_dtype="float32", batch_tokens=args.batch_tokens)
        columns["harness"] = scores_of_harness(ours, args.files)
        if args.hf:
            from lm_eval.models.huggingface import HFLM

            theirs = HFLM(pretrained=args.model, dtype="float32", add_bos_token=True, device="cpu", batch_size=8)
            columns["harness, hf"] = scores_of_harness(theirs, args.files)
    print("  ".join(["task metric".ljust(24), *(name.rjust(16) for name in columns)]))
    differ = 0
    for task, metrics in columns["harness"].items():
        for name in metrics:
            printed = [f"{scores[task][name]:.4f}" for scores in columns.values()]
            differ += printed[0] != printed[1]
            print("  ".join([f"{task} {name}".ljust(24), *(text.rjust(16) for text in printed)]))
    return 3 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
