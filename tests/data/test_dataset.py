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


def test_intact_set_opens(prepared):
    dataset = open_dataset(prepared)
    assert dataset.vocab_size == dataset.tokenizer().vocab_size == 320
    assert dataset.seq_len == 32
    assert dataset.sources("validation") == ("default", "laws", "news")


def cut(copy, keep):
    (copy / SHARD).write_bytes((copy / SHARD).read_bytes()[:keep])


def edit(**fields):
    return lambda copy: rewrite(copy, lambda body: body["shards"][0].update(fields))


DAMAGES = {  # what is done to a copy, and the error
    "flip": (lambda copy: flip(copy / SHARD, (copy / SHARD).stat().st_size // 2),
             f"{SHARD}: shard changed, its sha256 differs.*prepare it again"),
    "empty": (lambda copy: cut(copy, 0), f"{SHARD}: shard truncated"),
    "last byte": (lambda copy: cut(copy, -1), f"{SHARD}: shard truncated"),
    "grown": (lambda copy: (copy / SHARD).write_bytes((copy / SHARD).read_bytes() + b"x"),
              f"{SHARD}: shard changed, .* bytes instead of"),
    "deleted": (lambda copy: (copy / SHARD).unlink(), f"{SHARD}: shard missing; copy .* again"),
    "copied over": (lambda copy: shutil.copy(copy / "train-001-00000.array_record", copy / SHARD),
                    f"{SHARD}: shard changed, it is a duplicate of train-001-00000"),
    "unlisted": (lambda copy: shutil.copy(copy / SHARD, copy / "train-001-00009.array_record"),
                 "train-001-00009.array_record: a shard that the manifest does not list"),
    "listed twice": (lambda copy: rewrite(copy, lambda body: body["shards"].append(body["shards"][0])),
                     "train-000-00000.array_record: listed twice"),
    "edited": (lambda copy: (copy / "manifest.json").write_text(
                   (copy / "manifest.json").read_text().replace('"vocab_size": 320', '"vocab_size": 321')),
               "manifest.json: changed since it was written"),
    "no JSON": (lambda copy: (copy / "manifest.json").write_text("{"), "manifest.json: damaged"),
    "other JSON": (lambda copy: (copy / "manifest.json").write_text("{}"), "manifest.json: not the manifest"),
    "version": (lambda copy: rewrite(copy, lambda body: body.update(version=99)),
                "format version 99, this program reads 1"),
    "rows": (edit(rows=3), "rows, the manifest says 3"),
    "token": (edit(max_token=320),
              "train-000-00000.array_record: holds token id 320, outside the vocabulary of 320"),
    "tokenizer": (lambda copy: flip(copy / "tokenizer.json", 40), "tokenizer.json: changed"),
    "no tokenizer": (lambda copy: (copy / "tokenizer.json").unlink(), "tokenizer.json: missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_set_is_refused_by_file_and_reason(copy, name):
    damage, message = DAMAGES[name]
    damage(copy)
    with pytest.raises(ValueError, match=message):
        open_dataset(copy)


def test_directory_without_a_set_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no prepared data set here.*halfbyte data prepare"):
        open_dataset(tmp_path)


def test_token_outside_the_vocabulary_is_refused_in_its_batch(copy):
    """A shard and manifest that agree with each other and are both wrong: caught in the batch, by shard and row."""
    dataset = open_dataset(copy)
    rows = dataset.read_rows("train", "default").copy()
    rows["tokens"][2, 7] = 320  # the first that is outside
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
        ValueError, match="train-000-00000.array_record, row 2: token id 320 is outside the vocabulary of 320"
    ):
        for _, _ in zip(range(50), loader(open_dataset(copy), batch=4), strict=False):
            pass


def test_verify_sizes_leaves_damage_to_the_reader(copy):
    flip(copy / SHARD, 500)  # inside the first record
    dataset = open_dataset(copy, verify="sizes")
    with pytest.raises(ValueError, match=f"{SHARD}: shard damaged"):
        dataset.read_rows("train")
    with pytest.raises(ValueError, match=f"{SHARD}, row [0-9]+: shard damaged"):
        for _, _ in zip(range(50), loader(dataset, batch=4), strict=False):
            pass
    with pytest.raises(ValueError, match="verify 'quick'"):
        open_dataset(copy, verify="quick")


def test_rows_read_at_random_equal_rows_in_order(dataset):
    rows = dataset.rows("train")
    everything = rows.read_all()
    assert len(rows) == len(everything) == dataset.num_rows("train")
    for index in (0, 17, len(rows) - 1):
        np.testing.assert_array_equal(np.frombuffer(rows[index], rows.dtype)[0], everything[index])


def test_shards_of_any_size_hold_what_was_written(tmp_path):
    rows = np.zeros(23, row_dtype(8, 100))
    rows["tokens"] = np.arange(23 * 9).reshape(23, 9) % 100
    rows["segments"] = 1
    writer = ShardWriter(tmp_path, "train", "s", 0, dtype=rows.dtype, shard_bytes=7 * rows.dtype.itemsize)
    writer.write(rows[:5])
    writer.write(rows[5:])
    writer.close()
    assert [s.rows for s in writer.shards] == [7, 7, 7, 2]
    np.testing.assert_array_equal(ShardRows(tmp_path, writer.shards, rows.dtype).read_all(), rows)


def test_mixture_spec_is_parsed_or_refused():
    assert parse_mixture("a") == [("a", 1.0)]
    assert parse_mixture("a:0.7, b:0.3") == [("a", 0.7), ("b", 0.3)]
    assert parse_mixture("c:/odd") == [("c:/odd", 1.0)]
    for bad in ("a,b:1", "", ":3,b:1"):
        with pytest.raises(ValueError, match="--data"):
            parse_mixture(bad)


def test_mixture_of_unlike_sets_is_refused(corpus, prepared, dataset, tmp_path):
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
