"""What a compiled program is made of, read from its text: GEMMs, collectives, memory traffic, and their sources."""

from .attention import Attention, attention
from .categories import CATEGORIES, category, category_of_name
from .collectives import Collective, collectives
from .frames import Source
from .gemms import Gemm, gemms
from .groups import axes_of, read_groups
from .roofline import Roofline, as_profile, costs
from .schedule import Launch, launches
from .text import Array, Instruction, Program, Unreadable, read
from .traffic import bytes_of, move_of
