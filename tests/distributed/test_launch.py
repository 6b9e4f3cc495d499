"""Oracle: environments as Slurm and Open MPI document them."""

import socket

import pytest

from halfbyte.cli.train import gpu_settings, parse
from halfbyte.devices import is_known_xla_flag
from halfbyte.devices.jax_versions import ALL_GATHER_PIPELINING
from halfbyte.devices.xla_flags import (
    FLAG_SETS,
    PIPELINED_ALL_GATHER,
    RuntimeFlag,
    apply_flags,
    recommended_flags,
    with_installed_names,
)
from halfbyte.distributed import DistributedConfig, detect_cluster
from halfbyte.distributed.cluster_env import first_slurm_host, is_kubernetes_job
from halfbyte.distributed.initialize import _check_port_is_free

SLURM = {
    "SLURM_JOB_ID": "12345", "SLURM_STEP_NODELIST": "gpu[003-004]", "SLURM_NTASKS": "8", "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2",
}  # fmt: skip
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}  # fmt: skip


def test_alone():
    assert detect_cluster(DistributedConfig(), {}) is None
    assert detect_cluster(DistributedConfig(), {**SLURM, "SLURM_NTASKS": "1"}) is None
    assert detect_cluster(DistributedConfig(cluster="none"), SLURM) is None


def test_flags_bind_what_they_name():
    peers = detect_cluster(DistributedConfig(coordinator="127.0.0.1:9000", processes=2, process=1), SLURM)
    assert (peers.source, peers.coordinator_bind_address, peers.process_id) == ("flags", "127.0.0.1:9000", 1)
    told = DistributedConfig(coordinator="node1:9000", processes=2, process=0, coordinator_bind="0.0.0.0:9000")
    assert detect_cluster(told, {}).coordinator_bind_address == "0.0.0.0:9000"


def test_slurm():
    peers = detect_cluster(DistributedConfig(), SLURM)
    assert peers.coordinator == peers.coordinator_bind_address == f"gpu003:{61440 + 12345 % 4096}"
    assert (peers.num_processes, peers.process_id, peers.local_devices) == (8, 5, (1,))
    one_node = detect_cluster(DistributedConfig(), {**SLURM, "SLURM_STEP_NUM_NODES": "1"})
    assert one_node.coordinator_bind_address.startswith("127.0.0.1:")
    one_task_a_node = detect_cluster(DistributedConfig(), {**SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": "1"})
    assert one_task_a_node.local_devices is None


def test_first_host_of_slurm_node_lists():
    lists = {"a1": "a1", "a1,b2": "a1", "a[001-015],b": "a001", "n-x[7,9-12]": "n-x7"}
    assert {nodes: first_slurm_host(nodes) for nodes in lists} == lists


def test_openmpi():
    peers = detect_cluster(DistributedConfig(), MPI)
    assert (peers.source, peers.process_id, peers.local_devices) == ("openmpi", 3, (1,))
    assert peers.coordinator.startswith("10.96.0.1:")
    assert detect_cluster(
        DistributedConfig(), {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    ).coordinator_bind_address.startswith("127.0.0.1:")
    with pytest.raises(ValueError, match=r"--distributed\.coordinator HOST:PORT"):
        detect_cluster(DistributedConfig(), {**MPI, "OMPI_MCA_orte_hnp_uri": ""})


def test_kubernetes_is_seen_only_in_an_indexed_job():
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"}
    assert is_kubernetes_job(DistributedConfig(), pod)
    assert not is_kubernetes_job(DistributedConfig(), {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert not is_kubernetes_job(DistributedConfig(coordinator="a:1", processes=1, process=0), pod)


def test_bad_distributed_flags_are_refused():
    for options, words in (
        ({"coordinator": "nohost"}, "HOST:PORT"),
        ({"coordinator": "a:1", "processes": 2, "process": 2}, "0 <= I < N"),
        ({"cluster": "pbs"}, "slurm"),
    ):
        with pytest.raises(ValueError, match=words):
            DistributedConfig(**options)
    with pytest.raises(ValueError, match="holds no slurm job"):
        detect_cluster(DistributedConfig(cluster="slurm"), {})


def test_taken_port_is_refused():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(ValueError, match="another port"):
            _check_port_is_free(f"127.0.0.1:{holder.getsockname()[1]}")


def test_flags_are_applied_and_never_over_those_of_the_user():
    environ = {"XLA_FLAGS": "--xla_a=1", "NCCL_X": "0"}
    values = {"xla_a": "2", "xla_b": "3", "xla_c": "4", "NCCL_X": "1"}
    settings = tuple(RuntimeFlag(name, value, "w") for name, value in values.items())
    lines = apply_flags(settings, environ, known=lambda flag: flag != "xla_c")
    assert environ == {"XLA_FLAGS": "--xla_a=1 --xla_b=3", "NCCL_X": "0"}
    assert [str(line).split(" ")[0] for line in lines] == ["kept", "set", "left", "kept"]
    assert [(line.value, line.set_by_user) for line in lines] == [("1", True), ("3", False), (None, False), ("0", True)]


def test_flag_is_matched_by_whole_name():
    environ = {"XLA_FLAGS": "--xla_a_limit=3 --xla_b=true --xla_b=false"}
    lines = apply_flags(
        (RuntimeFlag("xla_a", "true", "a"), RuntimeFlag("xla_b", "true", "bits")), environ, known=lambda flag: True
    )
    assert environ["XLA_FLAGS"].endswith("--xla_a=true")
    assert [*map(str, lines)] == ["set --xla_a=true  (a)", "kept as you set it: xla_b=false, not true (bits)"]


def test_recommended_by_device():
    assert recommended_flags("cpu", several=True) == ()
    names = {setting.name: setting.value for setting in recommended_flags("NVIDIA GB300", several=True)}
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in names
    assert "NCCL_NVLS_ENABLE" in names
    hopper = {setting.name: setting.value for setting in recommended_flags("NVIDIA H200", several=False)}
    assert hopper["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "NCCL_NVLS_ENABLE" not in hopper


@pytest.mark.slow
def test_train_takes_a_set_of_flags_by_its_name(monkeypatch):
    monkeypatch.setattr("halfbyte.devices.xla_flags.visible_gpus", lambda: ["NVIDIA GB200"] * 8)
    flags = ("recommended", "own-turn", "none")
    recommended, own_turn, none = (set(gpu_settings(parse(["demo", "--xla-flags", name]))) for name in flags)
    assert own_turn > recommended > none == set()


@pytest.mark.slow
def test_every_recommended_flag_is_known_to_the_installed_xla():
    flags = [
        setting.name
        for setting in with_installed_names(recommended_flags("NVIDIA GB300", several=True))
        if setting.is_flag
    ]
    assert flags
    flags += [setting.name for settings in FLAG_SETS.values() for setting in with_installed_names(settings)]
    assert all(map(is_known_xla_flag, flags))
    assert len(set(ALL_GATHER_PIPELINING) & set(flags)) == 1  # tests/devices/test_jax_versions.py knows which
    assert not is_known_xla_flag("xla_gpu_no_such_flag_at_all")


@pytest.mark.parametrize("yours", ["xla_gpu_enable_pipelined_all_gather=false", "xla_gpu_pipeline_all_gather=off"])
def test_flag_set_under_its_other_name_is_kept(yours):
    environ = {"XLA_FLAGS": f"--{yours}"}
    (became,) = apply_flags((PIPELINED_ALL_GATHER,), environ)
    assert became.set_by_user and f"{became.setting.name}={became.value}" == yours
    assert environ == {"XLA_FLAGS": f"--{yours}"}


def test_bad_number_in_the_environment_is_refused_by_name():
    for name in set(SLURM) - {"SLURM_STEP_NODELIST"}:
        for value in ("x", "", "-1", "2.5"):
            with pytest.raises(ValueError, match=f"{name} is '{value}'"):
                detect_cluster(DistributedConfig(), {**SLURM, name: value})
