"""Loading. Oracle: the rows as stored. Property: global batches depend on data, seed and index, not on hosts."""

import json
import threading

import numpy as np
import pytest

from halfbyte.data import Mixture, loader, prepare, synthetic, validation_sources
from halfbyte.data.encode import rows_to_batch

from .conftest import make_documents, write_jsonl

BATCH = 8


def take(source, count: int) -> list[dict]:
    return [batch for _, batch in zip(range(count), source, strict=False)]


def joined(parts: list[dict]) -> dict:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


@pytest.fixture(scope="module")
def mixture(prepared, dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("other")
    path = write_jsonl(folder / "more.jsonl", make_documents(30, seed=9), "more")
    settings = {"tokenizer": prepared / "tokenizer.json", "seq_len": 32, "val_fraction": 0.2}
    from halfbyte.data import open_dataset

    other = open_dataset(prepare(path, out=folder / "set", **settings).directory)
    return Mixture((dataset, other), (0.7, 0.3))


@pytest.fixture(params=["one set", "mixture", "synthetic"])
def make(request, dataset, mixture):
    """A loader of each kind, by its keyword arguments."""
    if request.param == "synthetic":
        return lambda **kw: synthetic(320, 32, **{"batch": BATCH, "seed": 3, "document_length": 11, **kw})
    data = dataset if request.param == "one set" else mixture
    return lambda **kw: loader(data, **{"batch": BATCH, "seed": 3, **kw})


def test_batches_have_the_promised_shape(make):
    batch = next(make())
    assert set(batch) == {"tokens", "targets", "segments", "positions"}
    for array in batch.values():
        assert array.shape == (BATCH, 32) and array.dtype == np.int32
    assert batch["tokens"].min() >= 0 and batch["tokens"].max() < 320
    assert batch["targets"].min() >= -1


@pytest.mark.slow(fast_cases=["synthetic-4"])
@pytest.mark.parametrize("hosts", [2, 4])
def test_global_batches_are_the_same_on_any_number_of_hosts(make, hosts):
    alone = take(make(), 30)
    together = zip(*(take(make(host=h, hosts=hosts), 30) for h in range(hosts)), strict=True)
    for a, parts in zip(alone, together, strict=True):
        assert_same(a, joined(list(parts)))


@pytest.mark.slow(fast_cases=["synthetic-0", "synthetic-1000"])
@pytest.mark.parametrize("index", [0, 1, 13, 1000])
def test_resumes_anywhere_on_another_number_of_hosts(make, index):
    alone = make()
    alone.set_state({"next_index": index})
    expected = take(alone, 4)
    hosts = [make(host=h, hosts=4) for h in range(4)]
    for one in hosts:
        one.set_state(json.loads(json.dumps({"next_index": index})))
    for a in expected:
        assert_same(a, joined([next(one) for one in hosts]))


@pytest.mark.slow
def test_state_counts_batches_taken_not_read_ahead(make):
    source = make(prefetch=16)
    assert source.get_state() == {"next_index": 0}
    batches = take(source, 7)
    assert source.get_state() == {"next_index": 7}
    source.set_state({"next_index": 5})
    assert_same(next(source), batches[5])
    fresh = make()
    fresh.set_state({"next_index": 6})
    assert_same(next(fresh), batches[6])


@pytest.mark.slow
def test_seeds_differ_and_one_seed_repeats(make):
    assert_same(next(make(seed=3)), next(make(seed=3)))
    assert not np.array_equal(next(make(seed=3))["tokens"], next(make(seed=4))["tokens"])


@pytest.mark.parametrize("bad", [{}, {"next_index": -1}, {"next_index": "3"}, {"index": 3}])
def test_malformed_state_is_refused(make, bad):
    with pytest.raises(ValueError, match="next_index"):
        make().set_state(bad)


def test_epoch_holds_every_row_once_and_epochs_differ(dataset):
    rows = dataset.read_rows("train")
    count = len(rows)
    seen = joined(take(loader(dataset, batch=1, seed=0), 2 * count))["tokens"]
    stored = sorted(rows["tokens"][:, :-1].tolist())
    assert sorted(seen[:count].tolist()) == stored
    assert sorted(seen[count:].tolist()) == stored
    assert seen[:count].tolist() != seen[count:].tolist()
    assert seen[:count].tolist() != rows["tokens"][:, :-1].tolist()


@pytest.mark.slow
def test_mixture_is_drawn_in_proportion(mixture):
    rows = [{row.tobytes() for row in d.read_rows("train")["tokens"][:, :-1]} for d in mixture.datasets]
    drawn = joined(take(loader(mixture, batch=BATCH), 125))["tokens"].astype("<u2")
    from_first = sum(row.tobytes() in rows[0] for row in drawn)
    assert from_first == 700  # Grain spreads the shares evenly, no chance involved
    assert all(row.tobytes() in rows[0] | rows[1] for row in drawn)


def test_set_smaller_than_a_batch_can_be_part_of_a_mixture(mixture):
    small = mixture.datasets[1].num_rows("train")
    assert len(next(loader(mixture, batch=small + 1))["tokens"]) == small + 1


def test_validation_comes_once_in_order_by_source(dataset):
    for source in validation_sources(dataset):
        rows = dataset.read_rows("validation", source)
        batches = list(loader(dataset, batch=BATCH, split="validation", source=source))
        whole, expected = joined(batches), rows_to_batch(rows)
        for name in expected:
            np.testing.assert_array_equal(whole[name][: len(rows)], expected[name])
        assert (whole["targets"][len(rows) :] == -1).all() and (whole["segments"][len(rows) :] == 0).all()


def test_validation_counts_every_target_on_any_number_of_hosts(mixture):
    def count(**kw):
        source = loader(mixture, batch=BATCH, split="validation", **kw)
        batches = list(source)
        assert len(batches) == source.batches
        return sum(int((b["targets"] != -1).sum()) for b in batches)

    expected = sum(int((rows_to_batch(d.read_rows("validation"))["targets"] != -1).sum()) for d in mixture.datasets)
    assert count() == expected
    assert sum(count(host=h, hosts=4) for h in range(4)) == expected
    assert sum(count(source=source) for source in validation_sources(mixture)) == expected
    assert validation_sources(mixture) == ("default", "laws", "news", "more")


@pytest.mark.slow
def test_fewer_batches_can_be_asked_for(make, dataset):
    assert len(list(loader(dataset, batch=BATCH, split="validation", max_batches=1))) == 1
    assert len(list(loader(dataset, batch=BATCH, max_batches=3))) == 3
    assert len(list(loader(dataset, batch=BATCH, split="validation", max_batches=10**6))) < 100


def test_validation_loader_starts_over(dataset):
    source = loader(dataset, batch=BATCH, split="validation")
    first = list(source)
    source.set_state({"next_index": 0})
    for a, b in zip(first, source, strict=True):
        assert_same(a, b)


def test_one_source_alone_can_be_trained_on(dataset):
    rows = {row.tobytes() for row in dataset.read_rows("train", "laws")["tokens"][:, :-1]}
    drawn = joined(take(loader(dataset, batch=BATCH, source="laws"), 20))["tokens"].astype("<u2")
    assert all(row.tobytes() in rows for row in drawn)


def test_unsupported_loader_settings_are_refused(dataset):
    rows, top = dataset.num_rows("train"), max(shard.max_token for shard in dataset.manifest.shards)
    loader(dataset, batch=rows, vocab_size=top + 1).close()  # just enough rows, just enough ids
    for settings, message in (
        ({"batch": 6, "hosts": 4}, "global batch of 6 rows does not divide among 4 hosts"),
        ({"batch": 8, "hosts": 4, "host": 4}, "host 4 of 4"),
        ({"batch": rows + 1}, f"fewer than one global batch of {rows + 1}; add text"),
        ({"batch": 8, "seq": 64}, "rows of 32 tokens, the model reads 64"),
        ({"batch": 8, "vocab_size": top}, f"holds token id {top}, outside the model's vocabulary of {top}"),
        ({"batch": 8, "source": "nope"}, "no source 'nope' in train; it has default, laws, news"),
        ({"batch": 8, "source": "nope", "split": "validation"}, "source 'nope' has no validation rows"),
        ({"batch": 8, "split": "test"}, "split 'test'"),
        ({"batch": 8, "seed": -1}, "seed -1"),
    ):
        with pytest.raises(ValueError, match=message):
            loader(dataset, **settings)


def test_no_validation_says_how_to_get_one(corpus, tmp_path):
    from halfbyte.data import open_dataset

    out = prepare(corpus, tokenizer="bytes", out=tmp_path / "set", seq_len=32, val_fraction=0.0).directory
    with pytest.raises(ValueError, match="no validation rows .* prepare with --val-fraction or --validation"):
        loader(open_dataset(out), batch=2, split="validation")


def test_closed_loader_frees_its_threads(dataset):
    before = set(threading.enumerate())
    with loader(dataset, batch=BATCH) as source:
        next(source)
        assert set(threading.enumerate()) - before
    assert not set(threading.enumerate()) - before
    with pytest.raises(Exception, match="close"):
        next(source)


def test_synthetic_rows_are_a_function_of_seed_and_index():
    a = joined(take(synthetic(1000, 16, 4, seed=5), 6))["tokens"]
    b = joined(take(synthetic(1000, 16, 12, seed=5), 2))["tokens"]
    np.testing.assert_array_equal(a, b)
    assert len({row.tobytes() for row in a}) == len(a)


def test_synthetic_documents_and_ends():
    source = synthetic(50, 10, 2, document_length=4, batches=3)
    batches = list(source)
    assert len(batches) == source.batches == 3
    assert batches[0]["segments"][0].tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]
    assert batches[0]["positions"][0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert (batches[0]["targets"][0][[3, 7]] == -1).all()
    with pytest.raises(ValueError, match="vocab 1"):
        synthetic(1, 10, 2)


def test_synthetic_tokens_have_something_to_learn():
    tokens = joined(take(synthetic(256, 64, 16), 20))["tokens"].ravel()
    shares = np.bincount(tokens, minlength=256) / len(tokens)
    assert shares[0] > 5 * shares[10] > 0
    assert shares[200:].sum() > 0
