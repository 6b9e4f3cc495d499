"""Llama 3 and Qwen3: shapes, parameters and forward passes, as plain pytrees and pure functions."""

from typing import TYPE_CHECKING

from halfbyte.models.config import FAMILIES, HfFamily, LlamaConfig, family_of, param_specs, preset, presets
from halfbyte.models.kv_cache import KVCache, decode_step, prefill
from halfbyte.models.llama import apply, hidden_states, loss, loss_sum, token_nll
from halfbyte.models.model_context import REMAT_POLICIES, ModelContext
from halfbyte.models.moe import update_router_biases
from halfbyte.models.param_spec import GEMM_KINDS, ParamSpec, flatten_specs, map_specs, unflatten_specs
from halfbyte.models.params import (
    LinearShape,
    Params,
    abstract_params,
    check_dense,
    check_mesh,
    count_active_params,
    count_params,
    flat_param_specs,
    flops_by_component,
    flops_per_token,
    init,
    linear_shapes,
    linear_sites,
    matrix_mask,
    param_shardings,
    weight_decay_mask,
)
from halfbyte.models.quantized_params import (
    FUSED_GROUPS,
    group_amaxes,
    matrix_amaxes,
    quantize_weights,
    with_master_weights,
)
from halfbyte.renamed import old_names

if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
