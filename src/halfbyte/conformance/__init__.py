"""Does this device compute what the definition says? Asked before a run, and before a ratio is given."""

from .card import ask_card
from .mesh_bits import operands_on_mesh
from .native_gemms import SelfTestFailed, native_experts_agree, native_gemms_agree, native_sites_agree
from .operand_bits import check_stacks, definition, differing, operands_agree
