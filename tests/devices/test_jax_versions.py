"""What differs between JAX versions. Oracle: the installed JAX, of which each difference is asked in another way."""

import jax
import jax.numpy as jnp
import pytest

from halfbyte.devices import is_known_xla_flag
from halfbyte.devices.jax_versions import (
    ALL_GATHER_PIPELINING,
    REDUCE_SCATTER_PIPELINING,
    jax_series,
    scan_counts,
    transpose_ref,
)


def test_series_is_that_of_the_installed_jax():
    assert jax.__version__.startswith("{}.{}.".format(*jax_series()))


@pytest.mark.parametrize("flags", [ALL_GATHER_PIPELINING, REDUCE_SCATTER_PIPELINING], ids=lambda flags: flags[0])
def test_xla_has_one_name_of_a_renamed_flag(flags):
    has_new_name = jax_series() >= (0, 11)
    assert [is_known_xla_flag(flag) for flag in flags] == [has_new_name, not has_new_name]


def test_scan_counts_of_a_scan_with_two_constants_and_one_carry():
    def scanned(a, b, carry, xs):
        return jax.lax.scan(lambda c, x: (c * a + b, c + x), carry, xs)

    one = jnp.float32(1)
    (eqn,) = (e for e in jax.make_jaxpr(scanned)(one, one, one, jnp.ones(3)).eqns if e.primitive.name == "scan")
    assert scan_counts(eqn.params, eqn.invars) == (2, 1)


def test_transpose_ref_prefers_the_method():
    class Ref:
        def transpose(self, order):
            return "transposed", order

    assert transpose_ref(Ref(), (1, 0)) == ("transposed", (1, 0))
