"""Energy as a driver counts it. The driver is made up: nothing here has a GPU."""

import sys
from types import SimpleNamespace

import pytest

from halfbyte.devices import open_energy_meter
from halfbyte.plan import step_timing
from halfbyte.train import DeferredMetrics, Throughput


class Driver(SimpleNamespace):
    """NVML of a machine whose GPU `i` draws (i + 1) x 100 W, on a clock that the test moves."""

    NVMLError = type("NVMLError", (Exception,), {})
    now = 0.0

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByIndex(self, index):
        if index >= 4:
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return {"GPU-abc": 3}[uuid]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if self.now < 0:
            raise self.NVMLError("GPU is lost")
        return int(100_000 * (handle + 1) * self.now)


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def gpus(*places):
    return [SimpleNamespace(platform="gpu", local_hardware_id=place) for place in places]


@pytest.mark.parametrize(
    ("visible", "watts"), [("", 150), ("2,3", 350), ("GPU-abc,0", 250)], ids=["all", "some", "by UUID"]
)
def test_energy_counts_the_gpus_of_this_process(driver, visible, watts):
    found = open_energy_meter(gpus(0, 1), {"CUDA_VISIBLE_DEVICES": visible})
    driver.now = 60.0
    assert found.joules() == 60 * watts


def test_missing_energy_counter_says_why(driver, monkeypatch):
    cpu = [SimpleNamespace(platform="cpu", local_hardware_id=0)]
    assert "Invalid Argument" in open_energy_meter(gpus(7), {}).missing
    assert open_energy_meter(cpu, {}).joules() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    absent = open_energy_meter(gpus(0), {})
    assert "[energy]'" in absent.missing
    assert absent.joules() is None


def test_lost_driver_gives_no_joules_and_no_error(driver):
    late = DeferredMetrics(energy=open_energy_meter(gpus(0), {}).joules)
    late.enqueue(1, {})
    driver.now = -1.0
    assert late.enqueue(2, {}).joules is None
    assert late.flush().joules is None


def test_step_has_its_own_joules(driver):
    late = DeferredMetrics(clock=lambda: driver.now, energy=open_energy_meter(gpus(0), {}).joules)
    late.enqueue(1, {})
    driver.now = 2.0
    first = late.enqueue(2, {})
    driver.now = 10.0  # a validation
    late.restart_clock()
    driver.now = 11.0
    second = late.flush()
    assert (first.joules, second.joules) == (200.0, 100.0)
    rates = Throughput(tokens=1000, flops_per_token=1.0, devices=2).rates(first.step_time_s, first.joules)
    assert (rates["joules_per_device"], rates["tokens_per_joule"]) == (200.0, 2.5)


def test_bench_counts_the_steps_that_it_times(driver, monkeypatch):
    monkeypatch.setattr(step_timing.jax, "local_devices", lambda: gpus(0))

    def step(state, batch):
        driver.now += 0.5
        return state, {"loss": 0.0}

    _, joules, _ = step_timing._time(step, None, None, steps=4, repeats=2, warmup=3)
    assert joules == 50.0
