"""`auto`'s question to a card of a kind that nobody has seen. The native call is made right and wrong; what asks, what
is said, remembered and chosen is real. Oracle: the choice."""

import jax
import pytest

from halfbyte import ops
from halfbyte.conformance import ask_card, card
from halfbyte.devices import DEVICES, capability
from halfbyte.ops import Problem, choose
from halfbyte.recipe import recipe

CARD = DEVICES["rtx-5090"]
PROBLEM = Problem(recipe("nvfp4"), 256, 128, 256, device=CARD)


@pytest.fixture(autouse=True, scope="module")
def _quick(quick_compiles):
    """The emulated program is compiled once."""


@pytest.fixture
def here(monkeypatch, tmp_path):
    """The card is this machine's, and was never asked."""
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    monkeypatch.setattr(capability, "is_here", lambda device: device is CARD)
    monkeypatch.setattr(card, "lookup", lambda device: CARD)
    monkeypatch.setattr(capability, "_answers", {})


def answering(monkeypatch, native):
    """Give `native(y)` in place of the card's own result."""
    real = ops.qdot

    def qdot(x, w, *, backend, **options):
        y = real(x, w, backend="carrier", **options)
        return native(y) if backend == "native" else y

    monkeypatch.setattr(ops, "qdot", qdot)


def refused(y):
    raise jax.errors.JaxRuntimeError("INTERNAL: no engine for this graph")


WRONG = {"zero gradients": (lambda y: jax.lax.stop_gradient(y), True), "no engine": (refused, False)}
"""And whether it is the card's answer: one that could not be asked may be right tomorrow."""


def test_a_card_that_is_right_is_believed_and_remembered(here, monkeypatch):
    said = []
    assert choose("auto", PROBLEM).name != "native"  # before it was asked
    assert "not asked" in ops.passed_over(PROBLEM, "fused")["native"]
    answering(monkeypatch, lambda y: y)
    assert ask_card(said.append) is None
    assert choose("auto", PROBLEM).name == "native" and "native" in said[0]
    capability._answers.clear()  # as in the next process, where asking would go wrong
    answering(monkeypatch, refused)
    assert ask_card(said.append) is None and choose("auto", PROBLEM).name == "native"


@pytest.mark.slow(fast_cases=["zero gradients"])
@pytest.mark.parametrize("kind", WRONG)
def test_a_card_that_is_wrong_is_emulated_and_says_why(here, monkeypatch, tmp_path, kind):
    said = []
    native, remembered = WRONG[kind]
    answering(monkeypatch, native)
    reason = ask_card(said.append)
    assert reason and "emulated" in said[0] and reason in said[0]
    assert choose("auto", PROBLEM).name != "native"
    assert ops.passed_over(PROBLEM, "fused")["native"] == reason
    assert choose("native", PROBLEM).name == "native"  # by name it is taken, and checked before the first step
    assert (tmp_path / card.FILE).exists() == remembered


def test_other_devices_are_not_asked(here, monkeypatch):
    answering(monkeypatch, refused)
    for device in (DEVICES["b200"], DEVICES["h200"], DEVICES["cpu"], DEVICES["spark"]):
        monkeypatch.setattr(card, "lookup", lambda _, device=device: device)
        assert ask_card(pytest.fail) is None
