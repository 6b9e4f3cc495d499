"""Device meshes, sharding rules and the process group of a run.

Model code names the *dims* of an array by logical axes (`batch`, `embed`, `mlp`, ...). A mesh has four *axes*: `data`,
`fsdp`, `context` and `tensor`, and `expert` where it is named. `LogicalAxisRules` map each logical axis to the mesh
axes that it is sharded over. No other package depends on the shape of a mesh.

The processes of a run form one `ProcessGroup`: they compare their configs before they compute, stop at one step and end
together.
"""

from typing import TYPE_CHECKING

from halfbyte.renamed import old_names

if TYPE_CHECKING:
    from halfbyte.distributed.cluster_env import ClusterSpec, DistributedConfig, detect_cluster
    from halfbyte.distributed.heartbeat import GroupExit, Heartbeat, WatchdogLimits, exit_process, find_stalled_rank
    from halfbyte.distributed.initialize import initialize_distributed
    from halfbyte.distributed.jax_runtime import (
        SignalHandler,
        connect_distributed,
        is_connected,
        on_terminate,
        shutdown_and_exit,
    )
    from halfbyte.distributed.mesh import (
        DEFAULT_MESH_AXES,
        MOCK_NOTE,
        MockedDevices,
        axis_size,
        check_mock,
        default_shape,
        make_mesh,
        mesh_to_text,
        mock_gpu_topology,
        parse_mesh,
        total_axis_sizes,
    )
    from halfbyte.distributed.process_group import ProcessGroup, RankMismatchError
    from halfbyte.distributed.sharding_rules import (
        DEFAULT_RULES,
        LogicalAxisRules,
        check_model_dims,
        check_sharded,
        manual_axes,
        named_sharding,
        shard_map_over,
        with_logical_constraint,
    )

# Imported when they are first used.
_LATER = {
    "cluster_env": ("DistributedConfig", "ClusterSpec", "detect_cluster"),
    "heartbeat": ("Heartbeat", "GroupExit", "WatchdogLimits", "find_stalled_rank", "exit_process"),
    "initialize": ("initialize_distributed",),
    "jax_runtime": ("SignalHandler", "connect_distributed", "is_connected", "shutdown_and_exit", "on_terminate"),
    "mesh": (
        "DEFAULT_MESH_AXES",
        "MOCK_NOTE",
        "MockedDevices",
        "axis_size",
        "check_mock",
        "default_shape",
        "mesh_to_text",
        "make_mesh",
        "mock_gpu_topology",
        "parse_mesh",
        "total_axis_sizes",
    ),
    "process_group": ("RankMismatchError", "ProcessGroup"),
    "sharding_rules": (
        "DEFAULT_RULES",
        "LogicalAxisRules",
        "check_model_dims",
        "check_sharded",
        "with_logical_constraint",
        "named_sharding",
        "shard_map_over",
        "manual_axes",
    ),
}

if not TYPE_CHECKING:
    __getattr__ = old_names(__name__, _LATER)
