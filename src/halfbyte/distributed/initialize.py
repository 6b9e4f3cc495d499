"""Initializes JAX's multi-controller runtime for this process. Must run before the first use of a device."""

import os
import socket
from collections.abc import Callable

import jax
from jax._src import distributed

from halfbyte.distributed.cluster_env import (
    FIRST_PORT,
    LOOPBACK,
    ClusterSpec,
    DistributedConfig,
    detect_cluster,
    is_kubernetes_job,
)
from halfbyte.distributed.heartbeat import WatchdogLimits
from halfbyte.distributed.jax_runtime import connect_distributed, on_terminate
from halfbyte.distributed.process_group import ProcessGroup
from halfbyte.distributed.supervisor import exit_with_supervisor

HEARTBEAT_TIMEOUT_FACTOR = 10
"""Timeout of JAX's heartbeat relative to that of `ProcessGroup`, which must be first: JAX gives no message."""


def initialize_distributed(
    config: DistributedConfig, *, watchdog_s: float = 0.0, say: Callable[[str], None] = print
) -> ProcessGroup:
    """Connects to the peers, if there are any, and logs how. Returns the open group: its watchdog runs."""
    exit_with_supervisor(os.environ)
    silence = float(config.heartbeat_timeout_s)
    limits = WatchdogLimits(
        heartbeat_timeout_s=min(silence, watchdog_s) if watchdog_s else silence, step_timeout_s=watchdog_s
    )
    _configure_cpu_collectives(config, many=False)
    peers = detect_cluster(config, os.environ)
    client = None
    if peers is not None:
        _configure_cpu_collectives(config, many=True)
        client = _connect(config, peers)
    elif is_kubernetes_job(config, os.environ):
        _configure_cpu_collectives(config, many=True)
        peers = _connect_kubernetes(config)
        client = distributed.global_state.client
    if peers is None:
        return ProcessGroup(limits=limits).open()
    group = ProcessGroup(peers.process_id, peers.num_processes, client, limits=limits).open()
    on_terminate(group.on_runtime_terminated)
    text = f"process {peers.process_id} of {peers.num_processes} ({peers.source}), coordinator {peers.coordinator}"
    if peers.process_id == 0:
        text += f", listening on {peers.coordinator_bind_address}"
    say(text)
    return group


def _configure_cpu_collectives(config: DistributedConfig, *, many: bool) -> None:
    if config.cpu_devices:
        jax.config.update("jax_num_cpu_devices", config.cpu_devices)
        # A collective that waits for its peers blocks a thread of XLA's CPU client, which has NPROC threads.
        os.environ.setdefault("NPROC", str(max(16, 4 * config.cpu_devices)))
    if many:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")


def _connect(config: DistributedConfig, peers: ClusterSpec) -> object:
    if peers.process_id == 0:
        _check_port_is_free(peers.coordinator_bind_address)
    return connect_distributed(
        peers.coordinator,
        peers.num_processes,
        peers.process_id,
        bind=peers.coordinator_bind_address,
        local_devices=peers.local_devices,
        initialization_timeout_s=config.initialization_timeout_s,
        heartbeat_timeout_s=HEARTBEAT_TIMEOUT_FACTOR * config.heartbeat_timeout_s,
    )


def _connect_kubernetes(config: DistributedConfig) -> ClusterSpec:
    """Connects through the Kubernetes API, which JAX queries; the coordinator listens on its pod's address."""
    jax.config.update("jax_enable_preemption_service", False)  # `ProcessGroup` handles signals
    port = os.environ.setdefault("JAX_COORDINATOR_PORT", str(FIRST_PORT))
    address = socket.gethostbyname(socket.gethostname())
    bind = config.coordinator_bind or f"{address}:{port}"
    try:
        jax.distributed.initialize(
            coordinator_bind_address=bind,
            initialization_timeout=config.initialization_timeout_s,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_FACTOR * config.heartbeat_timeout_s,
        )
    except ValueError as error:
        raise ValueError(
            f"Kubernetes job found, but its peers were not ({error}); install jax[k8s] and let the service account "
            "read pods and jobs, or give --distributed.coordinator HOST:PORT --distributed.processes N "
            "--distributed.process $(JOB_COMPLETION_INDEX)"
        ) from None
    return ClusterSpec("kubernetes", f"{address}:{port}", bind, jax.process_count(), jax.process_index())


def _check_port_is_free(address: str) -> None:
    """Raises ValueError if the port is in use: later, the other processes would end with SIGABRT."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]") or LOOPBACK, int(port)))
        except OSError as error:
            raise ValueError(
                f"the coordinator cannot listen on {address}: {error.strerror}; "
                "give --distributed.coordinator another port"
            ) from None
