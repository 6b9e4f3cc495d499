"""XLA's error for kernels of a second GPU architecture is explained where JAX compiles for one per process. Oracle: the
versions of JAX that were tried (docs/plan.md), and JAX 0.11 itself."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from halfbyte import kernels as K
from halfbyte import ops
from halfbyte.devices import compile_target, device_by_name, pallas_lowering_device, topology
from halfbyte.devices.compile_target import lowering_device
from halfbyte.devices.jax_versions import mosaic_keeps_first_architecture

ROWS = itertools.count(1024, 128)  # JAX traces a kernel of a new shape anew
XLA_ERROR = "INTERNAL: Pass pipeline failed"


@pytest.fixture
def no_kernel_yet(monkeypatch):
    monkeypatch.setattr(compile_target, "_traced", {})


def gemm(a, b):
    return K.matmul(a, b, jnp.float32(1), jnp.float32(1))


def operands(**options):
    return (jax.ShapeDtypeStruct(shape, jnp.bfloat16, **options) for shape in ((next(ROWS), 512), (512, 512)))


def compile_with(error, name):
    """Traces our GEMM kernel for the device `name`, then fails as XLA does."""
    with ops.compile_for(device_by_name(name)):
        jax.eval_shape(gemm, *operands())
        if error:
            raise RuntimeError(error)


@pytest.mark.parametrize("name", ["h200", "gb300", "spark"])
def test_lowering_device_is_the_target(name):
    with pallas_lowering_device(device_by_name(name)):
        assert lowering_device() == device_by_name(name)


@pytest.mark.parametrize("name, blocks", [("h200", 132), ("b200", 148), ("gb300", 152)])
def test_persistent_gemm_has_one_block_per_sm_of_target(name, blocks):
    """Oracle: SMs as in the OpenXLA target descriptions. A local device is not asked: here it is a CPU."""
    with ops.compile_for(device_by_name(name)):
        assert f"grid=({blocks},)" in str(jax.make_jaxpr(gemm)(*operands()))


@pytest.mark.parametrize("second", ["b200", "gb300"])
def test_second_architecture_failure_names_the_remedy(monkeypatch, no_kernel_yet, second):
    monkeypatch.setattr(compile_target, "mosaic_keeps_first_architecture", lambda: True)
    compile_with(None, "h200")
    compile_with(None, second)  # tracing works
    with pytest.raises(RuntimeError, match="kernels for sm_90a: JAX .* Start another process for sm_10.a"):
        compile_with(XLA_ERROR, second)


@pytest.mark.parametrize(
    "keeps_first, first, error",
    [(False, "h200", XLA_ERROR), (True, "gb300", XLA_ERROR), (True, "h200", "out of memory")],
    ids=["another JAX", "one architecture", "another error"],
)
def test_other_failures_pass_unchanged(monkeypatch, no_kernel_yet, keeps_first, first, error):
    monkeypatch.setattr(compile_target, "mosaic_keeps_first_architecture", lambda: keeps_first)
    compile_with(None, first)
    with pytest.raises(RuntimeError) as raised:
        compile_with(error, "gb300")
    assert str(raised.value) == error


@pytest.mark.cuda_compiler
@pytest.mark.skipif(not mosaic_keeps_first_architecture(), reason="JAX 0.11 alone keeps the first architecture")
def test_jax_011_fails_for_the_second_architecture():
    """Really compiled, once for Hopper, the target of the other files, and once for Blackwell."""

    def compiled(name):
        (chip,) = topology(device_by_name(name), hosts=1, per_host=1).devices
        where = NamedSharding(Mesh(np.array([chip]), "x"), PartitionSpec())
        with ops.compile_for(device_by_name(name)):
            return jax.jit(gemm).lower(*operands(sharding=where)).compile()

    assert compiled("h200").as_text()
    with pytest.raises(RuntimeError, match="kernels for sm_103a cannot be compiled"):
        compiled("gb300")
