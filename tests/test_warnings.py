"""Whose warnings fail a test, under the filters of this very run: those of our code, and those that another package
lays to us because of what we call; not those that other packages have of themselves."""

import types
import warnings

import pytest

KINDS = (UserWarning, DeprecationWarning, FutureWarning, RuntimeWarning)


@pytest.mark.parametrize("kind", KINDS)
def test_what_other_packages_say_of_themselves_fails_nothing(kind):
    with warnings.catch_warnings(record=True) as seen:
        for module in ("torch.nn.modules.linear", "transformers.modeling_utils", "jax._src.dispatch", "not_halfbyte"):
            warnings.warn_explicit("this CPU has no bf16 path", kind, "theirs.py", 1, module=module)
    assert len(seen) == 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", ["halfbyte", "halfbyte.ops.qdot", __name__])
def test_what_our_code_causes_is_an_error(kind, module):
    with pytest.raises(kind):
        warnings.warn_explicit("this is deprecated", kind, "ours.py", 1, module=module)


def test_a_deprecated_call_of_ours_is_an_error():
    theirs = types.ModuleType("theirs")
    exec("import warnings\ndef old(): warnings.warn('use new', DeprecationWarning, stacklevel=2)", theirs.__dict__)
    with pytest.raises(DeprecationWarning, match="use new"):
        theirs.old()


@pytest.mark.slow
def test_pytorch_warns_from_c_without_failing_us():
    """As on a CPU without bf16 units; a deprecation of what we call still counts."""
    native = pytest.importorskip("torch", reason="needs the extra `interop`")._C
    with warnings.catch_warnings(record=True) as seen:
        native._warn()
    assert len(seen) == 1
    with pytest.raises(DeprecationWarning):
        native._warn_deprecation()
