"""Detects the other processes of a run: from flags, or from the environment of Slurm, Open MPI or Kubernetes.

The coordinator listens on loopback if the whole job is on one host, else on the one address that its peers connect to;
on other interfaces only with `--coordinator-bind`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from halfbyte.io import check_choices, check_int

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 61440, 4096


@dataclass(frozen=True)
class DistributedConfig:
    """Flags of a run of many processes. All empty: detected, else one process."""

    coordinator: str = ""
    """HOST:PORT of process 0."""
    processes: int = 0
    """Number of processes."""
    process: int = -1
    """Number of this process, from 0."""
    coordinator_bind: str = ""
    """Address process 0 listens on; default: the coordinator's own."""
    cluster: Literal["auto", "none", "slurm", "openmpi", "kubernetes"] = "auto"
    """Who has started the processes, and says in the environment which they are."""
    cpu_devices: int = 0
    """Show the CPU of each process as this many devices."""
    initialization_timeout_s: int = 300
    heartbeat_timeout_s: int = 60
    """A rank without a sign of life for this long is said to have stopped, and every rank ends."""

    def __post_init__(self) -> None:
        check_choices(self, group="distributed.")
        if self.coordinator and not re.fullmatch(r".+:\d+", self.coordinator):
            raise ValueError(f"distributed.coordinator must be HOST:PORT, got {self.coordinator!r}")
        if self.coordinator and not 0 <= self.process < self.processes:
            raise ValueError(
                "distributed.coordinator needs distributed.processes N and distributed.process I with 0 <= I < N, "
                f"got processes {self.processes}, process {self.process}"
            )
        check_int("distributed.cpu_devices", self.cpu_devices)


@dataclass(frozen=True)
class ClusterSpec:
    """Arguments of `jax.distributed.initialize`. `local_devices` None: every device of the host."""

    source: str
    coordinator: str
    coordinator_bind_address: str
    num_processes: int
    process_id: int
    local_devices: tuple[int, ...] | None = None


def detect_cluster(config: DistributedConfig, environ: Mapping[str, str]) -> ClusterSpec | None:
    """Returns the processes of this run; None for a single process and under Kubernetes, whose API JAX queries."""
    if config.coordinator:
        bind = config.coordinator_bind or config.coordinator
        return ClusterSpec("flags", config.coordinator, bind, config.processes, config.process)
    for name, detect in (("slurm", _slurm), ("openmpi", _openmpi)):
        if config.cluster in ("auto", name):
            spec = detect(environ)
            if spec is not None:
                return replace(spec, coordinator_bind_address=config.coordinator_bind or spec.coordinator_bind_address)
            if config.cluster == name:
                raise ValueError(
                    f"distributed.cluster is {name}, but the environment holds no {name} job of several tasks"
                )
    return None


def is_kubernetes_job(config: DistributedConfig, environ: Mapping[str, str]) -> bool:
    """Returns True in a pod of an indexed Kubernetes job, which has one process per pod."""
    is_allowed = config.cluster == "kubernetes" or (config.cluster == "auto" and not config.coordinator)
    return is_allowed and "KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" in environ


def _slurm(environ: Mapping[str, str]) -> ClusterSpec | None:
    needed = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if any(name not in environ for name in needed) or _number(environ, "SLURM_NTASKS") < 2:
        return None
    nodes, tasks = _number(environ, "SLURM_STEP_NUM_NODES", "1"), _number(environ, "SLURM_NTASKS")
    host = LOOPBACK if nodes == 1 else first_slurm_host(environ["SLURM_STEP_NODELIST"])
    address = f"{host}:{FIRST_PORT + _number(environ, 'SLURM_JOB_ID') % PORTS}"
    devices = _local_device_ids(_number(environ, "SLURM_LOCALID"), exclusive=tasks == nodes)
    return ClusterSpec("slurm", address, address, tasks, _number(environ, "SLURM_PROCID"), devices)


def _number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    """Returns an integer from the environment; ValueError, with the variable, if its value is none."""
    text = environ.get(name, default)
    if not re.fullmatch(r"\d{1,18}", text):
        raise ValueError(f"{name} is {text!r}, not a number; unset it, or give --distributed.cluster none")
    return int(text)


def _openmpi(environ: Mapping[str, str]) -> ClusterSpec | None:
    if _number(environ, "OMPI_COMM_WORLD_SIZE", "1") < 2:
        return None
    size, local = _number(environ, "OMPI_COMM_WORLD_SIZE"), _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    launcher = re.search(r"tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]]", uri)
    if size == local:
        host = LOOPBACK
    elif launcher:
        host = next(group for group in launcher.groups() if group)
    else:
        raise ValueError(
            "Open MPI does not say where process 0 is (OMPI_MCA_orte_hnp_uri is not set); "
            "give --distributed.coordinator HOST:PORT, --distributed.processes and --distributed.process"
        )
    job = int(head) // 4096 if (head := uri.partition(".")[0]).isdigit() else 0
    address = f"{host}:{FIRST_PORT + job % PORTS}"
    devices = _local_device_ids(_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", "0"), exclusive=local == 1)
    return ClusterSpec("openmpi", address, address, size, _number(environ, "OMPI_COMM_WORLD_RANK"), devices)


def _local_device_ids(local_rank: int, *, exclusive: bool) -> tuple[int, ...] | None:
    """Returns the device of this task if its host runs several tasks; None, all devices, if it runs only this one."""
    return None if exclusive else (local_rank,)


def first_slurm_host(nodes: str) -> str:
    """Returns the first host of a Slurm node list: `gpu[003-007,9],x1` -> `gpu003`."""
    match = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)
    if match is None:
        raise ValueError(f"cannot read the Slurm node list {nodes!r}; give --distributed.coordinator HOST:PORT")
    return match.group(1) + (match.group(2) or "")
