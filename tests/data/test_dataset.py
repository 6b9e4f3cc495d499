"""Opening. Every kind of damage that a disk or a person does is made for real and must be named before a step."""

import json
import shutil

import numpy as np
import pytest

from halfbyte.data import Mixture, loader, open_dataset, open_mixture, parse_mixture, prepare
from halfbyte.data.dataset_manifest import manifest_digest
from halfbyte.data.encode import row_dtype
from halfbyte.data.shard_files import ShardRows, ShardWriter

SHARD = "train-001-00001.array_record"


@pytest.fixture
def copy(prepared, tmp_path):
    return shutil.copytree(prepared, tmp_path / "set")


def flip(path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def rewrite(directory, change) -> None:
    """Edits the manifest and repairs its checksum: what a mistaken program, not a disk, would leave."""
    path = directory / "manifest.json"
    body = json.loads(path.read_text())
    body.pop("checksum")
    change(body)
    path.write_text(json.dumps({**body, "checksum": manifest_digest(body)}))


def test_an_intact_set_opens(prepared):
    dataset = open_dataset(prepared)
    assert dataset.vocab_size == dataset.tokenizer().vocab_size == 320
    assert dataset.seq_len == 32
    assert dataset.sources("validation") == ("default", "laws", "news")


@pytest.mark.slow
@pytest.mark.parametrize("where", [0, 0.3, 0.5, 0.99])
def test_a_flipped_bit_anywhere(copy, where):
    path = copy / SHARD
    flip(path, int(where * path.stat().st_size))
    with pytest.raises(ValueError, match=f"{SHARD}: shard changed, its sha256 differs.*prepare it again"):
        open_dataset(copy)


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_truncated_shard(copy, keep):
    path = copy / SHARD
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=f"{SHARD}: shard truncated"):
        open_dataset(copy)


def test_a_grown_shard(copy):
    with (copy / SHARD).open("ab") as f:
        f.write(b"x")
    with pytest.raises(ValueError, match=f"{SHARD}: shard changed, .* bytes instead of"):
        open_dataset(copy)


def test_a_deleted_shard(copy):
    (copy / SHARD).unlink()
    with pytest.raises(ValueError, match=f"{SHARD}: shard missing; copy .* again"):
        open_dataset(copy)


def test_a_shard_copied_over_another(copy):
    shutil.copy(copy / "train-001-00000.array_record", copy / SHARD)
    with pytest.raises(ValueError, match=f"{SHARD}: shard changed, it is a duplicate of train-001-00000"):
        open_dataset(copy)


def test_a_duplicate_beside_the_others(copy):
    shutil.copy(copy / SHARD, copy / "train-001-00009.array_record")
    with pytest.raises(ValueError, match="train-001-00009.array_record: a shard that the manifest does not list"):
        open_dataset(copy)


def test_a_shard_listed_twice(copy):
    rewrite(copy, lambda body: body["shards"].append(body["shards"][0]))
    with pytest.raises(ValueError, match="train-000-00000.array_record: listed twice"):
        open_dataset(copy)


def test_a_changed_manifest(copy):
    text = (copy / "manifest.json").read_text()
    (copy / "manifest.json").write_text(text.replace('"vocab_size": 320', '"vocab_size": 321'))
    with pytest.raises(ValueError, match="manifest.json: changed since it was written"):
        open_dataset(copy)


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", "\x00\x01"])
def test_a_broken_manifest(copy, damage):
    (copy / "manifest.json").write_text(damage)
    with pytest.raises(ValueError, match="manifest.json: (damaged|not the manifest)"):
        open_dataset(copy)


def test_another_version(copy):
    rewrite(copy, lambda body: body.update(version=99))
    with pytest.raises(ValueError, match="format version 99, this program reads 1"):
        open_dataset(copy)


def test_no_data_set_at_all(tmp_path):
    with pytest.raises(ValueError, match="no prepared data set here.*halfbyte data prepare"):
        open_dataset(tmp_path)


def test_a_changed_or_missing_tokenizer(copy):
    flip(copy / "tokenizer.json", 40)
    with pytest.raises(ValueError, match="tokenizer.json: changed"):
        open_dataset(copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="tokenizer.json: missing"):
        open_dataset(copy)


def test_a_wrong_row_count(copy):
    rewrite(copy, lambda body: body["shards"][0].update(rows=3))
    with pytest.raises(ValueError, match="rows, the manifest says 3"):
        open_dataset(copy)


def test_a_token_outside_the_vocabulary_by_the_manifest(copy):
    rewrite(copy, lambda body: body["shards"][0].update(max_token=320))
    with pytest.raises(
        ValueError, match="train-000-00000.array_record: holds token id 320, outside the vocabulary of 320"
    ):
        open_dataset(copy)


def test_a_token_outside_the_vocabulary_that_nothing_announced(copy):
    """A shard and manifest that agree with each other and are both wrong: caught in the batch, by shard and row."""
    dataset = open_dataset(copy)
    rows = dataset.read_rows("train", "default").copy()
    rows["tokens"][2, 7] = 500
    writer = ShardWriter(copy, "train", "default", 0, dtype=rows.dtype, shard_bytes=1 << 30)
    for path in copy.glob("train-*"):
        path.unlink()
    writer.write(rows)
    writer.close()
    held = [s for s in dataset.manifest.shards if s.split == "validation"]

    def change(body):
        body["shards"] = [{**vars(writer.shards[0]), "max_token": 319}, *(vars(s) for s in held)]
        body["splits"]["train"] = {"default": body["splits"]["train"]["default"]}

    rewrite(copy, change)
    with pytest.raises(
        ValueError, match="train-000-00000.array_record, row 2: token id 500 is outside the vocabulary of 320"
    ):
        for _, _ in zip(range(50), loader(open_dataset(copy), batch=4), strict=False):
            pass


def test_sizes_alone_can_be_verified_and_records_still_defend_themselves(copy):
    flip(copy / SHARD, 500)  # inside the first record
    dataset = open_dataset(copy, verify="sizes")
    with pytest.raises(ValueError, match=f"{SHARD}: shard damaged"):
        dataset.read_rows("train")
    with pytest.raises(ValueError, match=f"{SHARD}, row [0-9]+: shard damaged"):
        for _, _ in zip(range(50), loader(dataset, batch=4), strict=False):
            pass
    with pytest.raises(ValueError, match="verify 'quick'"):
        open_dataset(copy, verify="quick")


def test_rows_read_at_random_are_the_rows_read_in_order(dataset):
    rows = dataset.rows("train")
    everything = rows.read_all()
    assert len(rows) == len(everything) == dataset.num_rows("train")
    for index in (0, 17, len(rows) - 1):
        np.testing.assert_array_equal(np.frombuffer(rows[index], rows.dtype)[0], everything[index])


def test_shards_hold_what_was_written_at_any_size(tmp_path):
    rows = np.zeros(23, row_dtype(8, 100))
    rows["tokens"] = np.arange(23 * 9).reshape(23, 9) % 100
    rows["segments"] = 1
    writer = ShardWriter(tmp_path, "train", "s", 0, dtype=rows.dtype, shard_bytes=7 * rows.dtype.itemsize)
    writer.write(rows[:5])
    writer.write(rows[5:])
    writer.close()
    assert [s.rows for s in writer.shards] == [7, 7, 7, 2]
    np.testing.assert_array_equal(ShardRows(tmp_path, writer.shards, rows.dtype).read_all(), rows)


def test_mixture_specs():
    assert parse_mixture("a") == [("a", 1.0)]
    assert parse_mixture("a:0.7, b:0.3") == [("a", 0.7), ("b", 0.3)]
    assert parse_mixture("c:/odd") == [("c:/odd", 1.0)]
    for bad in ("a,b:1", "", ":3,b:1"):
        with pytest.raises(ValueError, match="--data"):
            parse_mixture(bad)


def test_only_alike_sets_mix(corpus, prepared, dataset, tmp_path):
    other = prepare(corpus, tokenizer=prepared / "tokenizer.json", out=tmp_path / "long", seq_len=64).directory
    with pytest.raises(ValueError, match="differ in seq_len .32 and 64"):
        open_mixture(f"{prepared}:1,{other}:1")
    other = prepare(corpus, tokenizer="bytes", out=tmp_path / "bytes", seq_len=32).directory
    with pytest.raises(ValueError, match="differ in tokenizer"):
        open_mixture([(prepared, 0.5), (other, 0.5)])
    with pytest.raises(ValueError, match="weight 0.0 of"):
        open_mixture([(prepared, 0.0)])
    with pytest.raises(ValueError, match="1 data sets with 2 weights"):
        Mixture((dataset,), (1.0, 2.0))
