"""Mocked GPUs. Oracle: what JAX is told, in the words of its own settings; no GPU is needed for that."""

import jax
import pytest

from halfbyte.distributed import MockedDevices, check_mock, mock_gpu_topology


def test_gpu_stands_for_one_of_eight(monkeypatch):
    told = {}
    monkeypatch.setattr(jax.config, "update", told.__setitem__)
    environ = {"XLA_FLAGS": "--xla_a=1"}
    mock = mock_gpu_topology(8, environ, gpu=True)
    assert told == {"jax_cuda_visible_devices": "0", "jax_mock_gpu_topology": "1x8x1"}
    assert environ["XLA_FLAGS"] == "--xla_a=1 --xla_gpu_shard_autotuning=false"
    assert mock == MockedDevices(8, "compute only", mocked=True)


def test_without_a_gpu_the_devices_are_real_and_it_is_said():
    mock = mock_gpu_topology(8, environ := {}, gpu=False)  # the tests' CPU has eight already
    assert "nothing mocked" in mock.label and not mock.mocked and environ == {}
    check_mock(mock)


def test_other_devices_than_asked_for_are_an_error():
    with pytest.raises(RuntimeError, match="asked for 8 devices, 1 of them in this process, but JAX has 8 and 8"):
        check_mock(MockedDevices(8, "compute only", mocked=True))
    with pytest.raises(ValueError, match="mock-gpus must be at least 2"):
        mock_gpu_topology(1, {}, gpu=True)
