"""Oracle: the linears that the model plans while its gradient is traced, recorded at `plan_linear`.

The precision manifest is written before anything is traced. Both ask `ops.linear_problem`; the shapes, mesh and
execution config that they ask it with are compared here.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from halfbyte import models
from halfbyte.devices import device_by_name
from halfbyte.distributed import make_mesh, mesh_to_text
from halfbyte.models.config import LlamaConfig
from halfbyte.ops import compile_for, linear, prequantize
from halfbyte.ops.linear_plan import plan_linear
from halfbyte.train import TrainConfig, precision_manifest
from halfbyte.train.precision_phases import phases
from halfbyte.train.train_step import make_model_context

MODEL = LlamaConfig(
    name="t", vocab_size=512, embed=256, mlp=512, layers=4, heads=4, kv_heads=4, head_dim=64, max_seq=256
)
WIDE = dataclasses.replace(MODEL, embed=1024, mlp=2048, heads=8, kv_heads=8, head_dim=128)
ONE, MESH = {"fsdp": 1}, {"fsdp": 4, "tensor": 2}


def case(device, recipe, policy, mesh, *, model=MODEL, unroll=1, remat="none", batch=8):
    name = "-".join([device, recipe, policy.replace(" ", ""), mesh_to_text(mesh) or "one", str(unroll), remat])
    return pytest.param((device, recipe, policy, mesh, model, unroll, remat, batch), id=name)


CASES = [
    *(
        case(device, recipe, "all_linear", mesh)
        for device in ("cpu", "h200", "b200")
        for recipe in ("nvfp4", "mxfp8", "fp8")
        for mesh in (ONE, MESH)
    ),
    case("h200", "nvfp4", "mlp", ONE, remat="quantized"),
    case("h200", "nvfp4", "mlp", ONE, unroll=0),
    case("h200", "halfbyte", "all_linear; layers[-2:]=bf16", ONE),
    case("h200", "nvfp4", "mlp", {"fsdp": 2, "context": 2, "tensor": 2}),
    case("h200", "nvfp4", "mlp", {"data": 8}),
    case("h200", "nvfp4", "all_linear", {"fsdp": 8}, batch=16),
    case("h200", "nvfp4", "mlp", ONE, model=WIDE, unroll=0),
    case("h200", "halfbyte", "mlp", ONE, model=WIDE, unroll=0),
    case("h200", "nvfp4", "all_linear", {"fsdp": 8}, model=WIDE),
    case("h200", "quartet2", "mlp", ONE, model=WIDE),
    case("gb300", "mxfp4", "all_linear", MESH, model=WIDE),
    case("cpu", "nvfp4_row", "all_linear", MESH),
]


@pytest.fixture
def traced_plans(monkeypatch):
    """The plans of the linears that are traced in this test."""
    plans = []

    def record(*args, **kwargs):
        plans.append(plan_linear(*args, **kwargs))
        return plans[-1]

    monkeypatch.setattr(linear, "plan_linear", record)
    monkeypatch.setattr(prequantize, "plan_linear", record)
    return plans


def decisions(plans):
    """What is decided of each quantized linear: its sizes on one device, its backend, its passes and its sharding."""
    return {(plan.problem, plan.choice, plan.sharding) for plan in plans if plan.recipe.quantized}


def run_of(parameters):
    device, recipe, policy, shape, model, unroll, remat, batch = parameters
    mesh = make_mesh(shape, jax.devices("cpu")[: math.prod(shape.values())])
    config = TrainConfig(
        name="t", model=model, recipe=recipe, policy=policy, mesh=mesh_to_text(shape) or "fsdp=1", batch=batch, seq=256,
        unroll=unroll, remat=remat,
    )  # fmt: skip
    (phase, *_) = phases(config)
    return config, phase.resolved(config), mesh, device_by_name(device)


def trace_gradient(config, resolved, mesh, device):
    batch = {name: jax.ShapeDtypeStruct((config.batch, config.seq), jnp.int32) for name in ("tokens", "targets")}

    def gradient(params, batch, key):
        ctx = dataclasses.replace(make_model_context(config, resolved, mesh, key), stacked=True)
        return jax.grad(lambda p: models.loss_sum(config.model, p, batch, ctx)[0])(params)

    with compile_for(device):
        jax.eval_shape(gradient, models.abstract_params(config.model), batch, jax.random.key(0))


def planned(config, resolved, device):
    """The plans that the manifest is written from."""
    step = precision_manifest.step_shapes(config, resolved, seq=config.seq, device=device)
    return [
        step.plan(site, chosen)
        for site in models.linear_shapes(config.model, step.rows, config.seq)
        if site.path.startswith("layers/")
        for *_, chosen in precision_manifest.layer_spans(site, resolved, config.model.layers)
    ]


FAST = [
    "cpu-nvfp4-all_linear-fsdp=4,tensor=2-1-none",
    "h200-nvfp4-all_linear-fsdp=4,tensor=2-1-none",
    "h200-halfbyte-all_linear;layers[-2:]=bf16-one-1-none",
]


@pytest.mark.slow(fast_cases=FAST)
@pytest.mark.parametrize("parameters", CASES)
def test_manifest_of_a_run_plans_what_its_trace_decides(parameters, traced_plans):
    config, resolved, mesh, device = run_of(parameters)
    trace_gradient(config, resolved, mesh, device)
    assert decisions(traced_plans) == decisions(planned(config, resolved, device))


def test_other_mesh_than_the_traced_one_is_a_difference(traced_plans):
    config, resolved, mesh, device = run_of(("h200", "nvfp4", "mlp", MESH, MODEL, 1, "none", 8))
    trace_gradient(config, resolved, mesh, device)
    other = dataclasses.replace(config, mesh="fsdp=8")
    assert decisions(traced_plans) != decisions(planned(other, resolved, device))
