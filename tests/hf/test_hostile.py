"""Files that lie, are broken or are somebody's trap. Oracles: the safetensors library (what it accepts, we read alike),
and the file system (nothing is read that was not there, nothing is written elsewhere)."""

import contextlib
import json
import os
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.numpy import save

from halfbyte.hf import HfFolder, config_to_hf, import_hf_folder
from halfbyte.hf.exporter import write_hf_folder
from halfbyte.hf.hf_folder import SafetensorsFile, TensorToWrite
from halfbyte.hf.load_weights import check_all_finite_tensors
from halfbyte.hf.tensor_layouts import TensorGroup, hf_tensors

from .conftest import LLAMA

F32 = np.dtype(np.float32)
TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros((0, 4), np.float16), "c": np.int64(7)[None]}


def raw(header, data=b""):
    """The bytes of a file with this header, whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def read_all(path):
    with SafetensorsFile(path) as file:
        return {name: file.read(name) for name in file.entries}


# What safe_open refuses, a case per kind of claim, and below what our own reader refuses.
BROKEN = {
    "no length": (b"\x01\x02", "header too small"),
    "a header longer than the file": ((2**20).to_bytes(8, "little") + b"{}", "invalid header length"),
    "a header that is no JSON": (raw(b"{nonsense"), "invalid JSON"),
    "a header of brackets": (raw(b"[" * 100_000), "invalid type: sequence"),
    "metadata that is no dict of strings": (raw({"__metadata__": {"a": 1}}), "expected a string"),
    "overlapping tensors": (raw({"a": entry(), "b": entry(offsets=(4, 12))}, b"x" * 12), "invalid offset.*`b`"),
    "a gap": (raw({"a": entry(), "b": entry(offsets=(9, 17))}, b"x" * 17), "invalid offset.*`b`"),
    "bytes that no tensor has": (raw({"a": entry()}, b"x" * 9), "not fully covered"),
    "shape x dtype above the bytes": (raw({"a": entry(shape=(3,))}, b"x" * 8), "invalid shape"),
    "a shape of 2^120 elements": (raw({"a": entry(shape=(2**40,) * 3)}, b"x" * 8), "overflow"),
    "a negative dim": (raw({"a": entry(shape=(-1, -2))}, b"x" * 8), "expected usize"),
    "an unknown dtype": (raw({"a": entry(dtype="F3")}, b"x" * 8), "unknown variant `F3`"),
    "a tensor that is a number": (raw({"a": 3}), "invalid type: integer"),
    "a name that moves the cursor": (raw({"\x1b]0;a\x07": entry(offsets=(4, 12))}, b"x" * 12), r"`\\x1b\]0;a\\x07`"),
    "a header of more bytes than are read": (b"\xff" * 8 + b"{}", "header claims"),
    "a name twice": (raw(b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2), b"x" * 8), "stands twice"),
    "a dtype that is not read": (raw({"a": entry(dtype="C64", shape=(1,))}, b"x" * 8), "has dtype C64; known are"),
    "a thousand dims": (raw({"a": entry(shape=(2,) + (1,) * 1000)}, b"x" * 8), "has 1,001 dims"),
    "a field too many": (raw({"a": entry() | {"code": "import os"}}, b"x" * 8), "has the field 'code'"),
}


def test_broken_file_is_refused_before_anything_is_allocated(tmp_path):
    path = tmp_path / "model.safetensors"
    tracemalloc.start()
    try:
        for content, message in BROKEN.values():
            path.write_bytes(content)
            tracemalloc.reset_peak()
            with pytest.raises(ValueError, match=message):
                read_all(path)
            assert tracemalloc.get_traced_memory()[1] < 2**22, message
    finally:
        tracemalloc.stop()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        SafetensorsFile(tmp_path / "pipe")
    with pytest.raises((ValueError, IsADirectoryError)):
        SafetensorsFile(tmp_path)


@pytest.mark.slow
@settings(max_examples=300)
@given(edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6), cut=st.integers(0, 400))
def test_fuzzed_file_is_refused_or_read_as_by_safetensors(tmp_path_factory, edits, cut):
    content = bytearray(save(TENSORS, {"format": "pt"}))
    for at, value in edits:
        content[at % len(content)] = value
    content = bytes(content[: len(content) - cut % len(content)]) if cut < 40 else bytes(content)
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(content)
    try:
        found = read_all(path)
    except ValueError:
        return
    theirs = dict(deserialize(content))  # raises if it would have refused what we took
    assert {name: value.tobytes() for name, value in found.items()} == {n: bytes(t["data"]) for n, t in theirs.items()}


@pytest.mark.parametrize("empty", [(2**62, 0), (0, 2**62), (2**40, 0, 4)])
def test_large_empty_tensor_takes_no_time(tmp_path, empty):
    """The format allows any dim in a tensor of no bytes; a loop over its rows would not end."""
    header = {"x.rotary_emb.inv_freq": entry(shape=empty, offsets=(0, 0)), "a": entry()}
    (tmp_path / "model.safetensors").write_bytes(raw(header, bytes(8)))
    (tmp_path / "config.json").write_text("{}")
    with HfFolder(tmp_path) as opened:
        assert opened.entries["x.rotary_emb.inv_freq"].shape == empty
        check_all_finite_tensors(opened)


@pytest.mark.parametrize("value", [np.nan, -np.inf, 2.0**63])
def test_nonfinite_weights_are_refused_by_tensor(tmp_path, value):
    """Nor are values read that are too large to be squared in float32."""
    (tmp_path / "config.json").write_text("{}")
    for last, refuses in ((value, True), (2.0**62, False)):
        data = np.array([1.0, last], np.float32).tobytes()
        (tmp_path / "model.safetensors").write_bytes(raw({"a": entry()}, data))
        expected = pytest.raises(ValueError, match="tensor a holds values that are not finite")
        with HfFolder(tmp_path) as opened, expected if refuses else contextlib.nullcontext():
            check_all_finite_tensors(opened)


# Folders


@pytest.fixture
def folder(tmp_path):
    """A whole model of two shards in `model`, and a secret beside it."""

    def part(site):
        return TensorGroup((TensorToWrite(site.name, F32, site.shape),), lambda: (np.ones(site.shape, F32),))

    parts = [part(site) for site in hf_tensors(LLAMA)]
    write_hf_folder(tmp_path / "model", parts, config_to_hf(LLAMA), {}, shard_bytes=100_000)
    (tmp_path / "secret.safetensors").write_bytes(save(TENSORS))
    return tmp_path / "model"


def refused(folder, message):
    before = sorted(path for path in folder.parent.rglob("*"))
    with pytest.raises(ValueError, match=message):
        import_hf_folder(folder, folder.parent / "run")
    assert sorted(path for path in folder.parent.rglob("*")) == before  # nothing written, nothing left


FIRST = "model-00001-of-00003.safetensors"
INDICES = [  # changes of the weight map, and the error
    *(({"model.norm.weight": name}, "not the plain name") for name in
      ("../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "a\\b.safetensors", "", "x\0y")),
    ({"model.norm.weight": FIRST}, "it lies in"),
    ({"extra": FIRST}, "no shard holds it"),
    ({"model.embed_tokens.weight": None}, "does not list 1 tensors"),
    (None, "weight_map must map"),
    ({"model.norm.weight": 3}, "weight_map must map"),
]  # fmt: skip


def test_index_that_is_wrong_or_leads_out_is_refused(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for changes, message in INDICES:
        names = {} if changes is None else index["weight_map"] | changes
        names = {name: shard for name, shard in names.items() if shard is not None}
        path.write_text(json.dumps(index | {"weight_map": names}))
        refused(folder, message)


def test_links_out_of_the_folder_are_refused(folder):
    first = sorted(folder.glob("*.safetensors"))[0]
    first.rename(folder / "elsewhere.safetensors")
    first.symlink_to("elsewhere.safetensors")
    with HfFolder(folder) as opened:
        assert opened.read("model.norm.weight").shape == (64,)
    (folder / "elsewhere.safetensors").rename(folder.parent / "elsewhere.safetensors")
    first.unlink()
    first.symlink_to(folder.parent / "elsewhere.safetensors")
    refused(folder, "leads out of the folder")
    (folder.parent / "elsewhere.safetensors").rename(folder.parent / "gone.safetensors")
    refused(folder, "symbolic link to nothing")
    first.unlink()
    refused(folder, "has no model-00001-of-")
    (folder / "config.json").rename(folder.parent / "config.json")
    (folder / "config.json").symlink_to(folder.parent / "config.json")
    refused(folder, "leads out of the folder")


class Trap:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("sprung",)


def test_pickles_are_refused_unread(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config_to_hf(LLAMA)))
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    refused(tmp_path / "model", "Reading a pickle runs the code")
    assert not (tmp_path / "sprung").exists()


def test_unsupported_config_is_refused_by_field(folder):
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    for change, message in (
        ({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM"),
        ({"architectures": ["MixtralForCausalLM"]}, "num_local_experts"),
        ({"architectures": None}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "auto_map"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"num_hidden_layers": 9000}, "num_hidden_layers"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm"),
        ({"num_hidden_layers": 1}, r"tensors have no place.*model\.layers\.1"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 128}, "has shape"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"vocab_size": True}, "vocab_size"),
    ):
        path.write_text(json.dumps(fields | change))
        refused(folder, message)
