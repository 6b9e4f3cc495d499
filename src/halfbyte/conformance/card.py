"""The question to a card that nobody has seen our native GEMMs run on, asked once and remembered for the machine."""

import contextlib
from collections.abc import Callable

import jax

from halfbyte.devices import NOT_ASKED, Device, cudnn_version, doubt, lookup, settle
from halfbyte.inputs import read_json, user_cache, write_json
from halfbyte.recipe import recipe

from .native_gemms import SelfTestFailed, native_gemms_agree

FILE = "cards.json"
QUESTION = 1  # another one is asked again: to be raised with what native GEMMs are made of


def ask_card(say: Callable[[str], None]) -> str | None:
    """Compare the native GEMMs of this machine's card with emulated ones, if it is of a kind that is asked, and say
    what `auto` takes. Why it emulates, or None. The answer holds for this board, cuDNN, JAX and question.
    """
    device = lookup(jax.devices()[0])
    if doubt(device) != NOT_ASKED:
        return doubt(device)
    answers, key = _remembered(), _key(device)
    if isinstance(answers.get(key), str):
        settle(device, answers[key])
        refused = f"emulated, because {answers[key]}; remove {user_cache() / FILE} and it is asked again"
        say(f"{device.name} has answered before: 4-bit GEMMs are {refused if answers[key] else 'native'}")
        return doubt(device)
    refusal, final = _compared()
    settle(device, refusal)
    if final:
        with contextlib.suppress(OSError):  # it is asked again by the next process
            user_cache().mkdir(parents=True, exist_ok=True)
            write_json(user_cache() / FILE, {**answers, key: refusal})
    verdict = f"emulated, because {refusal}" if refusal else "native: they equal emulated ones"
    say(f"{device.name} was asked: 4-bit GEMMs are {verdict}")
    return doubt(device)


def _compared() -> tuple[str, bool]:
    """Why native GEMMs are refused, or nothing; and whether that is the card's answer. A program that did not run (no
    memory left, no engine) is none: the next process asks again.
    """
    try:
        native_gemms_agree(recipe("nvfp4"))
    except (SelfTestFailed, jax.errors.JaxRuntimeError, ValueError) as error:
        said = f"the card's own are not right ({' '.join(str(error).split())[:300]})"
        return said, isinstance(error, SelfTestFailed)
    return "", True


def _remembered() -> dict[str, str]:
    try:
        stored = read_json(user_cache() / FILE)
    except (ValueError, OSError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _key(device: Device) -> str:
    cudnn = ".".join(map(str, cudnn_version(device)))
    return f"{device.kind}; cuDNN {cudnn}; jax {jax.__version__}; question {QUESTION}"
