"""Losses of MaxText on real text, a run per arm of docs/evidence/maxtext/plan.json, through MaxText's own pipeline.

    nice -n 10 python3 benchmarks/maxtext_text.py CORPUS.jsonl.xz FOLDER

FOLDER gets the data, and each arm's metrics file and TensorBoard events; an arm that is there is not run again.
"""

import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

PLAN = Path(__file__).parents[1] / "docs/evidence/maxtext/plan.json"
CHARACTERS, VOCABULARY = 3_000_000, 2048
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LAUNCH = """import sys; from halfbyte.integrations import maxtext; maxtext.install(recipe={recipe!r}, seed={seed!r})
from absl import app; from maxtext.trainers.pre_train import train; app.run(train.main, ['train', *sys.argv[1:]])"""


def prepare(corpus, folder):
    """Writes FOLDER/text.parquet and FOLDER/tokenizer."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True)
    texts, total = [], 0
    with lzma.open(corpus, "rt", encoding="utf-8") as lines:
        while total < CHARACTERS:
            texts.append(json.loads(next(lines))["text"][: CHARACTERS - total])
            total += len(texts[-1])
    pq.write_table(pa.table({"text": texts}), folder / "text.parquet")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=list(SPECIAL.values()), show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **SPECIAL).save_pretrained(folder / "tokenizer")


def main(corpus, folder):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE"}
    folder, plan, losses = Path(folder).resolve(), json.loads(PLAN.read_text()), {}
    if not folder.exists():
        prepare(corpus, folder)
    for name, arm in plan["arms"].items():
        metrics, part = folder / f"{name}.json", folder / f"{name}.part"
        if not metrics.exists():
            words = f"{plan['arguments']} {arm.get('arguments', '')} run_name={name} base_output_directory={folder} "
            words += f"metrics_file={part} grain_train_files={folder}/text.parquet tokenizer_path={folder}/tokenizer"
            launch = LAUNCH.format(recipe=arm.get("recipe"), seed=arm.get("seed"))
            command = [sys.executable, "-c", launch, "src/maxtext/configs/base.yml", *words.split()]
            subprocess.run(command, env=env, check=True)
            part.rename(metrics)
        losses[name] = [round(json.loads(row)["learning/loss"], 5) for row in metrics.read_text().splitlines()]
        (PLAN.parent / "losses.json").write_text(json.dumps(losses).replace("], ", "],\n") + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
