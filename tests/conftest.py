"""Strictness for every test: dtypes never promote by themselves, ranks never broadcast by accident."""

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
