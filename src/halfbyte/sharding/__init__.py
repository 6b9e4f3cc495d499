"""Where arrays live: a mesh of devices, logical axes, and the rules from one to the other.

Model code names the *dims* of an array by what they mean (`batch`, `embed`, `mlp`, ...). A mesh has four *axes*:
`data`, `fsdp`, `context` and `tensor`, and `expert` where it is named. `Rules` say which mesh axes each logical axis is
split over. Nothing else in the product knows about a mesh's shape.
"""

from halfbyte.sharding.checks import check_model_dims, check_sharded
from halfbyte.sharding.hybrid import default_shape
from halfbyte.sharding.mesh import AXES, axis_size, format_mesh, make_mesh, parse_mesh, whole_sizes
from halfbyte.sharding.rules import (
    DEFAULT_RULES,
    Rules,
    constrain,
    named_sharding,
    on_parts,
    outer_axes,
)
