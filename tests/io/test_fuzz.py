"""Every reader under fire: configs, data manifests, checkpoint records, tokenizers, recipes and policies, compressed
text. A reader gives a value or a ValueError (a checkpoint its own two errors): no traceback of another kind."""

import contextlib
import copy
import json
import zlib

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from halfbyte.checkpoint.checkpoint_record import CheckpointRecord, CheckpointStructureError, CorruptCheckpointError
from halfbyte.data import open_dataset, prepare
from halfbyte.data.compression import decompress_blocks
from halfbyte.data.dataset import parse_mixture
from halfbyte.data.dataset_manifest import manifest_digest, read_manifest
from halfbyte.data.tokenizer import Tokenizer, bpe_size, byte_tokenizer
from halfbyte.distributed import parse_mesh
from halfbyte.io import dataclass_json
from halfbyte.recipes import policy, recipe
from halfbyte.train import TrainConfig, read_rows
from halfbyte.train.run_presets import run_config, run_names

fire = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
more_fire = settings(fire, max_examples=250)

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.integers(-(10**40), 10**40)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["", "..", "nvfp4", "a\0b", "\x1b[2J", "[/bold]", "inf", "-1", "\ud800", "é" * 300])
)
nested = st.recursive(leaves, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=8), x), max_leaves=8)
values = leaves | nested


def places(tree, path=()):
    """Every path into nested dicts and lists."""
    yield path
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inside:
        yield from places(value, (*path, key))


def mutated(tree, draw):
    """The tree with a value replaced, removed, or added beside it, at one to three places."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([place for place in places(tree) if place]))
        holder = tree
        for key in path[:-1]:
            holder = holder[key]
        action = draw(st.sampled_from(["replace", "remove", "add"]))
        if action == "remove":
            del holder[path[-1]]
        elif action == "add" and isinstance(holder, dict):
            holder[draw(st.text(max_size=6))] = draw(values)
        else:
            holder[path[-1]] = draw(values)
    return tree


@pytest.mark.slow
@more_fire
@given(st.data())
def test_configs(data):
    base = dataclass_json.to_dict(run_config(data.draw(st.sampled_from(run_names()))))
    with contextlib.suppress(ValueError):
        made = dataclass_json.from_dict(TrainConfig, mutated(base, data.draw))
        assert dataclass_json.from_dict(TrainConfig, dataclass_json.to_dict(made)) == made


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "a.txt").write_text("some words and others " * 200)
    return prepare(folder / "a.txt", tokenizer="bytes", out=folder / "set", seq_len=16, val_fraction=0.2).directory


@more_fire
@given(data=st.data())
def test_manifests(data, prepared, tmp_path_factory):
    """The checksum is made true again: what is wrong must be found in the content."""
    body = json.loads((prepared / "manifest.json").read_text())
    body.pop("checksum")
    wrong = mutated(body, data.draw)
    folder = tmp_path_factory.mktemp("manifest")
    for file in prepared.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "manifest.json").unlink()
    try:
        text = json.dumps({**wrong, "checksum": manifest_digest(wrong)}, ensure_ascii=False).encode("utf-8")
    except (UnicodeEncodeError, ValueError):
        assume(False)
    (folder / "manifest.json").write_bytes(text)
    with contextlib.suppress(ValueError):
        read_manifest(folder)
        open_dataset(folder, verify="sizes").tokenizer()


@more_fire
@given(st.data())
def test_checkpoint_records(data):
    leaf = {"shape": [4, 2], "dtype": "float32", "checksum": [1, 2]}
    stored = CheckpointRecord(
        12, {"params": {"a/b": leaf, "c": leaf}}, {"config": {"steps": 3}, "data": None}
    ).to_json()
    body = mutated(json.loads(stored["record"]), data.draw)
    text = json.dumps(body)
    with contextlib.suppress(CorruptCheckpointError, CheckpointStructureError):
        CheckpointRecord.from_json({"record": text, "crc32": zlib.crc32(text.encode("utf-8", "surrogatepass"))})


TOKENIZER = json.loads(byte_tokenizer().text)
TOKENIZER["model"]["vocab"] = dict(list(TOKENIZER["model"]["vocab"].items())[60:75])
PARTS = [
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
    {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"Regex": "("}, "content": ""}]},
    {"type": "Metaspace", "replacement": "ab", "prepend_scheme": "always", "split": True},
    {"type": "Unigram", "unk_id": 7, "vocab": [["a", 0.0], ["b", -1.0]]},
    {"type": "WordPiece", "unk_token": "x", "continuing_subword_prefix": "", "max_input_chars_per_word": 0},
    {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
]


@pytest.mark.slow
@fire
@given(data=st.data())
def test_tokenizers(data, capfd):
    wrong = mutated(TOKENIZER, data.draw)
    part = data.draw(st.sampled_from(["normalizer", "pre_tokenizer", "post_processor", "decoder", "model", "none"]))
    if part != "none":
        wrong[part] = data.draw(st.sampled_from(PARTS))
    with contextlib.suppress(ValueError):
        made = Tokenizer(json.dumps(wrong), eos=data.draw(st.sampled_from([None, "<|endoftext|>", "b"])))
        with contextlib.suppress(Exception):  # a text without tokens; what matters is that nothing panics or hangs
            made.decode(made.encode("some text"))
    assert "panicked" not in capfd.readouterr().err


words = st.text(alphabet="nvfp4mx8b16_o rht/*;=[]:-.,@layersmlp{}0é²", max_size=30)


@more_fire
@given(words)
def test_recipes_policies_meshes_and_mixtures(text):
    base = recipe("nvfp4")
    for read in (recipe, lambda t: policy(t, base), parse_mesh, parse_mixture, lambda t: bpe_size("bpe:" + t)):
        with contextlib.suppress(ValueError):
            read(text)


@fire
@given(content=st.binary(max_size=400), suffix=st.sampled_from([".zst", ".xz", ".gz"]), head=st.booleans())
def test_compressed_bytes(content, suffix, head, tmp_path_factory):
    magic = {".zst": b"\x28\xb5\x2f\xfd", ".xz": b"\xfd7zXZ\x00", ".gz": b"\x1f\x8b\x08"}[suffix]
    path = tmp_path_factory.mktemp("bytes") / f"a.txt{suffix}"
    path.write_bytes(magic * head + content)
    with contextlib.suppress(ValueError):
        for _ in decompress_blocks(path, name="a", unchecked=True):
            pass


@fire
@given(content=st.binary(max_size=200))
def test_metrics_files(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + content + b'\n{"step": 2}\n')
    assert {"step": 1} in read_rows(path) and {"step": 2} in read_rows(path)
