"""`auto`'s question to a card of a kind that nobody has seen. The native call is made right and wrong; what asks, what
is said, remembered and chosen is real. Oracle: the choice."""

import jax
import pytest

from halfbyte import ops
from halfbyte.devices import DEVICES, capability
from halfbyte.ops import LinearProblem, choose_backend, run_gemm_selftest_once, selftest_gemms
from halfbyte.ops.backends import cudnn_block_scaled
from halfbyte.recipes import recipe

CARD = DEVICES["rtx-5090"]
PROBLEM = LinearProblem(recipe("nvfp4"), 256, 128, 256, device=CARD)


@pytest.fixture(autouse=True, scope="module")
def _quick(quick_compiles):
    """The emulated program is compiled once."""


@pytest.fixture
def here(monkeypatch, tmp_path):
    """The card is this machine's, and was never asked."""
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    monkeypatch.setattr(capability, "is_local_device", lambda device: device is CARD)
    monkeypatch.setattr(selftest_gemms, "lookup", lambda device: CARD)
    monkeypatch.setattr(capability, "_device_verdicts", {})
    for module in (cudnn_block_scaled, selftest_gemms):  # no cuDNN is loaded here
        monkeypatch.setattr(module, "cudnn_version", lambda device: capability.CUDNN_VERSION)


def answering(monkeypatch, native):
    """Give `native(y)` in place of the card's own result."""
    real = selftest_gemms.qdot

    def qdot(x, w, *, backend, **options):
        y = real(x, w, backend="emulated", **options)
        return native(y) if backend == "native" else y

    monkeypatch.setattr(selftest_gemms, "qdot", qdot)


def refused(y):
    raise jax.errors.JaxRuntimeError("INTERNAL: no engine for this graph")


WRONG = {"zero gradients": (lambda y: jax.lax.stop_gradient(y), True), "no engine": (refused, False)}
"""And whether it is the card's answer: one that could not be asked may be right tomorrow."""


def test_a_card_that_is_right_is_believed_and_remembered(here, monkeypatch):
    said = []
    assert choose_backend("auto", PROBLEM).name != "native"  # before it was asked
    assert "not asked" in ops.rejected_backends(PROBLEM, "fused")["native"]
    answering(monkeypatch, lambda y: y)
    assert run_gemm_selftest_once(said.append) is None
    assert choose_backend("auto", PROBLEM).name == "native" and "native" in said[0]
    capability._device_verdicts.clear()  # as in the next process, where asking would go wrong
    answering(monkeypatch, refused)
    assert run_gemm_selftest_once(said.append) is None and choose_backend("auto", PROBLEM).name == "native"


@pytest.mark.slow(fast_cases=["zero gradients"])
@pytest.mark.parametrize("kind", WRONG)
def test_a_card_that_is_wrong_is_emulated_and_says_why(here, monkeypatch, tmp_path, kind):
    said = []
    native, remembered = WRONG[kind]
    answering(monkeypatch, native)
    reason = run_gemm_selftest_once(said.append)
    assert reason and "emulated" in said[0] and reason in said[0]
    assert choose_backend("auto", PROBLEM).name != "native"
    assert ops.rejected_backends(PROBLEM, "fused")["native"] == reason
    assert choose_backend("native", PROBLEM).name == "native"  # by name it is taken, and checked before the first step
    assert (tmp_path / selftest_gemms.CACHE_FILE).exists() == remembered


def test_other_devices_are_not_asked(here, monkeypatch):
    answering(monkeypatch, refused)
    for device in (DEVICES["b200"], DEVICES["h200"], DEVICES["cpu"], DEVICES["spark"]):
        monkeypatch.setattr(selftest_gemms, "lookup", lambda _, device=device: device)
        assert run_gemm_selftest_once(pytest.fail) is None
