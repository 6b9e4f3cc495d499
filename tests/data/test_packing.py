"""Packing. Property: rows, unpacked and joined, are the documents; a batch follows from its rows token by token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.data.encode import SequencePacker, row_dtype, rows_to_batch, split_rows_by_segment

documents_and_width = st.tuples(
    st.lists(st.lists(st.integers(0, 299), min_size=1, max_size=40), min_size=1, max_size=12), st.integers(2, 17)
)


def pack(documents: list[list[int]], seq_len: int, *, at_once: int = 1, source: int = 5) -> np.ndarray:
    packer = SequencePacker(row_dtype(seq_len, 300), source)
    parts = []
    for i in range(0, len(documents), at_once):
        group = documents[i : i + at_once]
        tokens = np.concatenate([np.array(d, np.uint32) for d in group])
        starts = np.concatenate([np.arange(len(d)) == 0 for d in group])
        parts.append(packer.add(tokens, starts))
    return np.concatenate([*parts, packer.finish()])


@pytest.mark.slow
@given(documents_and_width)
def test_rows_joined_are_the_documents_in_order(case):
    documents, seq_len = case
    rows = pack(documents, seq_len)
    stream = np.concatenate(list(split_rows_by_segment(rows)))
    assert stream.tolist() == [token for d in documents for token in d]
    assert (rows["source"] == 5).all()


@pytest.mark.slow
@given(documents_and_width, st.integers(1, 5))
def test_how_documents_arrive_does_not_matter(case, at_once):
    documents, seq_len = case
    np.testing.assert_array_equal(pack(documents, seq_len), pack(documents, seq_len, at_once=at_once))


@given(documents_and_width)
def test_segments_restart_count_up_and_pad_only_at_the_very_end(case):
    documents, seq_len = case
    segments = pack(documents, seq_len)["segments"].astype(int)
    assert (segments[:, 0] == 1).all()
    assert (segments[:-1] > 0).all()
    last = segments[-1][segments[-1] > 0]
    assert (segments[-1][len(last) :] == 0).all()
    for row in [*segments[:-1], last]:
        assert set(np.diff(row)) <= {0, 1}


@given(documents_and_width)
def test_boundaries_of_segments_are_boundaries_of_documents(case):
    documents, seq_len = case
    rows = pack(documents, seq_len)
    owner = np.repeat(np.arange(len(documents)), [len(d) for d in documents])
    flat = rows["segments"].reshape(-1)[: len(owner)]
    width = seq_len + 1
    for i in range(1, len(owner)):
        if i % width:
            assert (flat[i] != flat[i - 1]) == (owner[i] != owner[i - 1])


@pytest.mark.slow
@given(documents_and_width)
def test_batch_follows_from_its_rows(case):
    documents, seq_len = case
    rows = pack(documents, seq_len)
    batch = rows_to_batch(rows)
    for name, array in batch.items():
        assert array.dtype == np.int32 and array.shape == (len(rows), seq_len) and array.flags.c_contiguous, name
    for r, row in enumerate(rows):  # the definition, one token at a time
        position = -1
        for i in range(seq_len):
            here, following = row["segments"][i], row["segments"][i + 1]
            position = position + 1 if i and here == row["segments"][i - 1] else 0
            scored = here == following and following != 0
            assert batch["tokens"][r, i] == row["tokens"][i]
            assert batch["targets"][r, i] == (row["tokens"][i + 1] if scored else -1)
            assert batch["segments"][r, i] == here
            assert batch["positions"][r, i] == position


def test_tokens_but_starts_are_targets_once():
    documents = [list(range(1, 30)), list(range(30, 75))]
    targets = rows_to_batch(pack(documents, 10))["targets"]
    rows = pack(documents, 10)["tokens"]
    expected = [token for row in rows for token in row[1:] if token not in (0, 30)]
    assert targets[targets >= 0].tolist() == expected


def test_wide_ids_and_long_rows_get_wide_fields():
    assert row_dtype(8, 1 << 16)["tokens"].base == np.dtype("<u2")
    assert row_dtype(8, (1 << 16) + 1)["tokens"].base == np.dtype("<u4")
    assert row_dtype((1 << 16) - 1, 300)["segments"].base == np.dtype("<u4")
