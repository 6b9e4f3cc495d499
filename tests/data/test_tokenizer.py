"""Tokenizers. Oracle: the text itself (byte-level encodings lose nothing) and the bytes of UTF-8."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from halfbyte.data import END_OF_TEXT, Tokenizer, load_tokenizer
from halfbyte.data.tokenizer import bpe_size, byte_tokenizer, train_bpe

BYTES = byte_tokenizer()
BPE = train_bpe(["the state of the union is strong " * 20, "naïve 数"], 300)


@pytest.mark.slow
@given(st.text())
def test_ids_of_the_byte_tokenizer_are_the_bytes(text):
    assert BYTES.encode(text) == list(text.encode())
    assert BYTES.decode(BYTES.encode(text)) == text


@pytest.mark.slow
@given(st.text())
def test_bpe_loses_nothing(text):
    assert BPE.decode(BPE.encode(text)) == text


def test_markers():
    assert (BYTES.vocab_size, BYTES.eos_id, BYTES.bos_id) == (257, 256, 256)
    assert BYTES.encode("a", bos=True, eos=True) == [256, 97, 256]
    assert BYTES.decode([256, 97, 256]) == "a"
    assert BYTES.decode([256, 97], markers=True) == f"{END_OF_TEXT}a"


@pytest.mark.parametrize("tokenizer", [BYTES, BPE])
def test_text_that_spells_a_marker_stays_text(tokenizer):
    text = f"before {END_OF_TEXT} after"
    ids = tokenizer.encode(text)
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text]) == [ids]


def test_training_twice_gives_one_file():
    texts = ["to be or not to be " * 9, "that is the question"]
    assert train_bpe(texts, 280).text == train_bpe(texts, 280).text


def test_bpe_has_the_size_asked_for_when_the_text_allows():
    assert BPE.vocab_size <= 300
    assert train_bpe(["the state of the union, the law of the land, the people of the nation"], 264).vocab_size == 264


@pytest.mark.parametrize("spec", ["bpe:", "bpe:many", "bpe:-5", "bpe:256"])
def test_bad_size_is_refused(spec):
    with pytest.raises(ValueError, match="vocabulary's size"):
        bpe_size(spec)


def test_foreign_tokenizer_keeps_its_own_markers(tmp_path):
    inner = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1}, unk_token="<unk>"))
    inner.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.encode("hello", bos=True, eos=True) == [2, 1, 3]
    assert loaded.vocab_size == 4


def test_tokenizer_without_markers_asks_for_them(tmp_path):
    inner = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "[END]": 1}, unk_token="[UNK]"))
    path = tmp_path / "tokenizer.json"
    inner.save(str(path))
    with pytest.raises(ValueError, match="no known eos token.*--eos"):
        load_tokenizer(path)
    assert load_tokenizer(path, eos="[END]").bos_id == 1
    with pytest.raises(ValueError, match="'nope' is not in the tokenizer's vocabulary"):
        load_tokenizer(path, eos="nope")


def test_file_that_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"version": 3}))
    with pytest.raises(ValueError, match="x.json: not a tokenizer.json"):
        load_tokenizer(tmp_path / "x.json")
    with pytest.raises(ValueError, match="absent.json: no such file"):
        load_tokenizer(tmp_path / "absent.json")


def test_vocab_size_covers_the_largest_id():
    gap = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 9}, unk_token="a"))
    assert Tokenizer(gap.to_str()).vocab_size == 10
