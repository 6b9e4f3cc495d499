"""Llama 3 and Qwen3: shapes, parameters and forward passes, as plain pytrees and pure functions."""

from halfbyte.models.cache import Cache, decode_step, prefill
from halfbyte.models.config import FAMILIES, Family, LlamaConfig, family_of, param_specs
from halfbyte.models.context import REMAT, Context
from halfbyte.models.experts import rebalance
from halfbyte.models.flops import GemmSite, flops_per_token, flops_shares, gemm_sites
from halfbyte.models.llama import apply, hidden_states, loss, loss_sum, token_nll
from halfbyte.models.params import (
    Params,
    abstract_params,
    check_mesh,
    count_active,
    count_params,
    decay_mask,
    declared,
    init,
    linear_sites,
    matrix_mask,
    param_shardings,
    refuse_experts,
)
from halfbyte.models.presets import preset, presets
from halfbyte.models.quantized import FUSED, amaxes_of, group_amaxes, quantize_weights, with_anchors
from halfbyte.models.spec import GEMMS, ParamSpec, flatten, map_specs, nest
