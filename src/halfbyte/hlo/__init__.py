"""Parse the text of a compiled HLO module: GEMMs, collectives, memory traffic, execution counts, and source lines."""

from halfbyte.hlo.collective_ops import Collective, find_collectives, mesh_axes_of_groups, parse_replica_groups
from halfbyte.hlo.gemm_ops import AttentionCall, HloGemm, find_attention_calls, find_gemms
from halfbyte.hlo.hlo_text import HloArray, HloInstruction, HloModule, HloParseError, SourceLine, parse_hlo
from halfbyte.hlo.memory_traffic import (
    OP_CATEGORIES,
    category_of_name,
    data_movement_kind,
    instruction_bytes,
    op_category,
)
from halfbyte.hlo.roofline import Roofline, instruction_costs_us, to_profile_proto
from halfbyte.hlo.trip_counts import WeightedInstruction, execution_counts
