"""Starts JAX's own multi-controller runtime for this process. Must run before the first device is touched."""

import os
import socket
from collections.abc import Callable

import jax
from jax._src import distributed

from halfbyte.ranks import Group, Limits, connect, on_terminate

from .cluster import FIRST_PORT, LOOPBACK, DistributedConfig, Peers, find_peers, under_kubernetes
from .supervise import end_with_supervisor

BACKSTOP = 10
"""JAX's own heartbeat ends a group without a sentence; ours comes first."""


def start(config: DistributedConfig, *, watchdog_s: float = 0.0, say: Callable[[str], None] = print) -> Group:
    """Connect to the peers, if there are any, and say how. The group that comes back is open: it watches."""
    end_with_supervisor(os.environ)
    silence = float(config.heartbeat_timeout_s)
    limits = Limits(silence=min(silence, watchdog_s) if watchdog_s else silence, progress=watchdog_s)
    _settle_cpu(config, many=False)
    peers = find_peers(config, os.environ)
    client = None
    if peers is not None:
        _settle_cpu(config, many=True)
        client = _connect(config, peers)
    elif under_kubernetes(config, os.environ):
        _settle_cpu(config, many=True)
        peers = _connect_kubernetes(config)
        client = distributed.global_state.client
    if peers is None:
        return Group(limits=limits).open()
    group = Group(peers.process, peers.processes, client, limits=limits).open()
    on_terminate(group.runtime_died)
    text = f"process {peers.process} of {peers.processes} ({peers.source}), coordinator {peers.coordinator}"
    if peers.process == 0:
        text += f", listening on {peers.bind}"
    say(text)
    return group


def _settle_cpu(config: DistributedConfig, *, many: bool) -> None:
    if config.cpu_devices:
        jax.config.update("jax_num_cpu_devices", config.cpu_devices)
        # A collective that waits for its peers holds a thread of XLA's CPU client, which has NPROC of them.
        os.environ.setdefault("NPROC", str(max(16, 4 * config.cpu_devices)))
    if many:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")


def _connect(config: DistributedConfig, peers: Peers) -> object:
    if peers.process == 0:
        _check_port_is_free(peers.bind)
    return connect(
        peers.coordinator,
        peers.processes,
        peers.process,
        bind=peers.bind,
        local_devices=peers.local_devices,
        initialization_timeout_s=config.initialization_timeout_s,
        heartbeat_timeout_s=BACKSTOP * config.heartbeat_timeout_s,
    )


def _connect_kubernetes(config: DistributedConfig) -> Peers:
    """JAX asks the Kubernetes API for the job's pods; the coordinator listens on its pod's address."""
    jax.config.update("jax_enable_preemption_service", False)  # signals are the group's
    port = os.environ.setdefault("JAX_COORDINATOR_PORT", str(FIRST_PORT))
    own = socket.gethostbyname(socket.gethostname())
    bind = config.coordinator_bind or f"{own}:{port}"
    try:
        jax.distributed.initialize(
            coordinator_bind_address=bind,
            initialization_timeout=config.initialization_timeout_s,
            heartbeat_timeout_seconds=BACKSTOP * config.heartbeat_timeout_s,
        )
    except ValueError as error:
        raise ValueError(
            f"Kubernetes job found, but its peers were not ({error}); install jax[k8s] and let the service account "
            "read pods and jobs, or give --distributed.coordinator HOST:PORT --distributed.processes N "
            "--distributed.process $(JOB_COMPLETION_INDEX)"
        ) from None
    return Peers("kubernetes", f"{own}:{port}", bind, jax.process_count(), jax.process_index())


def _check_port_is_free(address: str) -> None:
    """A taken port would leave the other processes to die of SIGABRT; say it here, before they connect."""
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
