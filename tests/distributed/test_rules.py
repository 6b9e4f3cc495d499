"""Oracle: the table of the module's docstring, by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from halfbyte.distributed import (
    DEFAULT_RULES,
    check_model_dims,
    check_sharded,
    make_mesh,
    named_sharding,
    with_logical_constraint,
)


def mesh(**shape):
    return make_mesh(shape, jax.devices("cpu"))


SPECS = [
    (("batch", "seq", "width"), P(("data", "fsdp", "expert"), "context")),
    (("batch", "residual_seq", "width"), P(("data", "fsdp", "expert"), ("context", "tensor"))),
    (("layers", "embed", "mlp"), P(None, "fsdp", "tensor")),
    (("layers", "mlp", "embed"), P(None, "tensor", "fsdp")),
    (("vocab", "embed"), P("tensor", "fsdp")),
    (("batch", "embed"), P(("data", "fsdp", "expert"))),  # an axis is used once: the first dim that wants it has it
    ((None, "head_dim"), P()),
]


def test_specs_of_default_rules():
    assert [DEFAULT_RULES.spec(axes) for axes, _ in SPECS] == [spec for _, spec in SPECS]
    # axes of size one are left out
    assert DEFAULT_RULES.spec(("batch", "seq", "heads"), mesh(data=2, tensor=4)) == P("data", None, "tensor")


def test_rules_can_be_replaced():
    rules = DEFAULT_RULES.replace(embed=("fsdp", "context"))
    assert rules.spec(("embed", "mlp")) == P(("fsdp", "context"), "tensor")
    with pytest.raises(ValueError, match="no logical axis 'embd'"):
        DEFAULT_RULES.replace(embd=("fsdp",))


def test_constrain():
    x = jnp.zeros((8, 16))
    assert with_logical_constraint(x, ("batch", None), None) is x
    on = mesh(fsdp=8)
    y = jax.jit(lambda x: with_logical_constraint(x + 1, ("batch", None), on))(x)
    assert y.sharding.is_equivalent_to(named_sharding(("batch", None), on), 2)


def test_dim_that_does_not_divide_is_named():
    with pytest.raises(ValueError, match="the batch is 6, which data=2 x fsdp=4 does not divide"):
        check_sharded(6, "batch", mesh(data=2, fsdp=4), what="the batch")


def test_shard_that_cuts_a_block_is_refused():
    shapes = {"layers/mlp/up": ((2, 64, 96), ("layers", "embed", "mlp"))}
    check_model_dims(shapes, mesh(fsdp=4, tensor=2))
    with pytest.raises(
        ValueError, match="'embed' of layers/mlp/up is 64, and fsdp=8 leaves 8.*at most 4 shards: fewer devices"
    ):
        check_model_dims(shapes, mesh(fsdp=8))
