"""The embedded corpus. Oracle: the committed files, and processes that really race."""

import json
import lzma
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.data import demo_dataset, ngram_baselines
from halfbyte.data.demo_corpus import demo_files
from halfbyte.data.tokenizer import train_bpe
from halfbyte.io import user_cache


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in lzma.open(path, "rt", encoding="utf-8")]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def demo(cache):
    return demo_dataset(cache)


@pytest.mark.slow
def test_training_again_gives_the_committed_tokenizer():
    train, _, tokenizer = demo_files()
    assert train_bpe(texts(train), 1024).text == tokenizer.read_text(encoding="utf-8")


def test_split_is_by_document(demo):
    train, validation, _ = demo_files()
    assert not set(texts(train)) & set(texts(validation))
    assert demo.manifest.splits["train"]["sotu"].documents == len(texts(train)) == 36
    assert demo.manifest.splits["validation"]["sotu"].documents == len(texts(validation)) == 2
    assert (demo.vocab_size, demo.seq_len) == (1024, 128)


def test_text_survives_the_tokenizer(demo):
    tokenizer = demo.tokenizer()
    text = texts(demo_files()[1])[0]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_demo_is_prepared_once_per_length(cache, demo):
    stamp = (demo.directory / "manifest.json").stat().st_mtime_ns
    assert demo_dataset(cache).directory == demo.directory
    assert (demo.directory / "manifest.json").stat().st_mtime_ns == stamp
    assert demo_dataset(cache, seq_len=64).seq_len == 64


def test_damaged_cache_is_named_and_made_anew(demo, tmp_path, capsys):
    shard = shutil.copytree(demo.directory, tmp_path / demo.directory.name) / "train-000-00000.array_record"
    shard.write_bytes(shard.read_bytes()[:-5])
    assert demo_dataset(tmp_path).manifest == demo.manifest
    assert "train-000-00000.array_record: shard truncated" in capsys.readouterr().err


def test_cache_that_cannot_be_written_names_the_way_out(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="cannot be written into .*file.*HALFBYTE_CACHE"):
        demo_dataset(tmp_path / "file")


def test_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "a"))
    assert user_cache() == tmp_path / "a"
    monkeypatch.delenv("HALFBYTE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert user_cache() == tmp_path / "b" / "halfbyte"


def test_processes_that_race_all_get_it(tmp_path):
    program = "import sys; from halfbyte.data import demo_dataset; print(demo_dataset(sys.argv[1]).num_rows('train'))"
    racers = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [racer.communicate(timeout=1800)[0].strip() for racer in racers]
    assert len(set(answers)) == 1 and int(answers[0]) > 4000
    assert len(list(tmp_path.iterdir())) == 1  # one data set, no leftovers


@pytest.mark.slow
def test_baselines_of_the_demo(demo):
    """Pinned to two decimals: the bar that a model trained on the demo is held to."""
    assert ngram_baselines(demo) == pytest.approx({"unigram": 5.953, "bigram": 4.163}, abs=0.005)


def test_data_imports_no_jax():
    program = "import sys, halfbyte.data; sys.exit('jax' in sys.modules or 'grain' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
