"""The runner with losses put in place of training: signals at any moment, damaged rows, data that changed."""

import io
import json
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from fakes import fake_parity, fake_run, plan_of

from halfbyte.checkpoint import RunDirectoryLockedError, RunLock
from halfbyte.study import runner
from halfbyte.study.analysis import analyse_study
from halfbyte.study.study_plan import write_or_check_plan
from halfbyte.study.study_runs import RUN_DONE, RUN_PARTIAL, cell_directory, run_status
from halfbyte.train.loop import RunResult
from halfbyte.train.run_identity import load_identity, save_identity

PLAN = plan_of(candidates=("nvfp4",))


def trains(plan, *, meanwhile=lambda group, folder: None):
    """As `train`: writes a whole run, or leaves one that is complete as it is."""
    begun = []

    def train(config, folder, *, group, **_):
        begun.append((folder.parent.name, config.seed))
        if not folder.exists():
            arm = next(arm for arm in plan.arms if arm.name == folder.parent.name)
            fake_run(folder, plan, arm, config.seed, gap=0.001, noise=0.0001, diverged=False)
        meanwhile(group, folder)
        return RunResult(folder, config.steps)

    return train, begun


def run(plan, folder, monkeypatch, train, **options):
    monkeypatch.setattr(runner, "train", train)
    said = []
    return runner.run_cells(plan, folder, plan.jobs(), say=said.append, **options), said


def test_a_run_that_is_held_is_said_with_a_flag_that_a_study_has(tmp_path, monkeypatch):
    plan = write_or_check_plan(tmp_path, PLAN)

    def train(config, folder, **_):
        with RunLock(folder), RunLock(folder):
            pass

    with pytest.raises(
        RunDirectoryLockedError, match=r"is held by another process \(pid .*give --out another"
    ) as refused:
        run(plan, tmp_path, monkeypatch, train)
    assert "--run-dir" not in str(refused.value)


def test_a_signal_near_the_end_of_a_run_ends_the_parity(tmp_path, monkeypatch):
    plan = write_or_check_plan(tmp_path, PLAN)
    heard = threading.Event()
    monkeypatch.setattr(runner, "PATIENCE_S", 600.0)  # on a slow machine this process would leave in earnest

    def interrupt(group, folder):
        group.leave_step_loop()
        group.report_activity("finish")
        request, group.request_stop = group.request_stop, lambda name: (request(name), heard.set())
        os.kill(os.getpid(), signal.SIGINT)
        assert heard.wait(600)

    train, begun = trains(plan, meanwhile=interrupt)
    stopped, said = run(plan, tmp_path, monkeypatch, train)
    assert stopped == "SIGINT" and begun == [("bf16", 0)]
    assert any(line.startswith("SIGINT: stopping") for line in said)
    assert run_status(cell_directory(tmp_path, plan.baseline, 0), plan.base.steps).state == "done"  # and it counts


@pytest.mark.slow(fast_cases=["5-1"])
@pytest.mark.parametrize("within, count", [(5, 1), (41, 3), (60, 5), (1e9, 12)])
def test_no_run_begins_that_would_not_end_in_time(tmp_path, monkeypatch, within, count):
    """The first takes 20 s, the others 10, by a clock that training alone moves; the same call goes on later."""
    plan = write_or_check_plan(tmp_path, PLAN)
    now = [0.0]
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def tick(group, folder):
        now[0] += 10 if now[0] else 20

    train, begun = trains(plan, meanwhile=tick)
    stopped, said = run(plan, tmp_path, monkeypatch, train, within=within)
    assert stopped is None and len(begun) == min(count, len(plan.jobs()))
    assert any("not begun" in line for line in said) == (len(begun) < len(plan.jobs()))
    if len(begun) < len(plan.jobs()):
        run(plan, tmp_path, monkeypatch, train)
        assert begun == [(arm.name, seed) for arm, seed in plan.jobs()]


def test_a_signal_while_a_run_compiles_ends_the_process_with_a_report(tmp_path, monkeypatch):
    plan = write_or_check_plan(tmp_path, PLAN)
    left, over = [], threading.Event()
    monkeypatch.setattr(runner.os, "_exit", lambda code: (left.append(code), over.set()))

    def compile_for_ever(group, folder):
        group.report_activity("compile")
        os.kill(os.getpid(), signal.SIGTERM)
        assert over.wait(600)

    train, begun = trains(plan, meanwhile=compile_for_ever)
    stopped, _ = run(plan, tmp_path, monkeypatch, train, leave=left.append)
    assert left[:2] == ["SIGTERM", 75] and stopped == "SIGTERM" and len(begun) == 1


def test_a_report_that_cannot_be_written_does_not_keep_the_process(monkeypatch):
    """A signal while a compiler is at work, and a disk that is full."""
    left, said, over = [], [], threading.Event()
    monkeypatch.setattr(runner.os, "_exit", lambda code: (left.append(code), over.set()))
    monkeypatch.setattr(runner, "PATIENCE_S", 0.05)

    def full(signal):
        raise OSError("no space left on device")

    with runner.StopSignal(said.append, full):
        os.kill(os.getpid(), signal.SIGTERM)
        assert over.wait(600)
    assert left[0] == 75 and "no space left on device" in said[1]


@pytest.mark.slow
def test_a_step_in_progress_is_waited_for(tmp_path, monkeypatch, until):
    plan = write_or_check_plan(tmp_path, PLAN)
    left = []
    monkeypatch.setattr(runner, "PATIENCE_S", 0.1)
    monkeypatch.setattr(runner.os, "_exit", left.append)

    def step(group, folder):
        group.report_activity("step", 3)
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: group.stop_reason_before(4) is not None)
        time.sleep(5 * runner.PATIENCE_S)
        assert group.stop_reason_before(4) == "SIGINT" and not left

    train, begun = trains(plan, meanwhile=step)
    assert run(plan, tmp_path, monkeypatch, train)[0] == "SIGINT" and len(begun) == 1


def test_a_complete_run_whose_last_row_is_damaged_is_trained_anew(tmp_path, monkeypatch):
    plan = fake_parity(tmp_path, PLAN)
    folder = cell_directory(tmp_path, plan.arms[1], 0)
    whole = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["validation_loss"]
    (folder / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes()[:-30])
    train, begun = trains(plan)
    stopped, said = run(plan, tmp_path, monkeypatch, train)
    assert stopped is None and begun == [("nvfp4", 0)] * 2
    assert (tmp_path / "damaged" / "nvfp4-seed-0-1" / "metrics.jsonl").is_file()
    assert not any(f"{whole:.4f}" in line for line in said[:-1]) and "trained anew" in said[-2]
    assert analyse_study(plan, tmp_path)["complete"]
    assert run(plan, tmp_path, monkeypatch, train)[0] is None and len(begun) == 2


def test_data_that_changed_between_two_arms_stops_before_the_next_is_trained(tmp_path, monkeypatch):
    plan = fake_parity(tmp_path, PLAN, skip={("nvfp4", 2)})
    for arm, seed in plan.jobs()[:-2]:
        folder = cell_directory(tmp_path, arm, seed)
        if folder.exists():
            known = load_identity(folder)
            save_identity(folder, type(known)(**{**vars(known), "data": "as it was"}))
    train, begun = trains(plan)
    with pytest.raises(ValueError, match="^data: .*as it was"):
        run(plan, tmp_path, monkeypatch, train)
    assert not begun


def test_a_decided_study_ends_and_seeds_that_are_added_to_it_are_run(tmp_path, monkeypatch):
    gaps = {"bf16": 0.0, "nvfp4": 0.004, "bf16-twin": 0.0, "control-fp4_one_scale": 0.4}
    looks = plan_of(candidates=("nvfp4",), seeds=5, looks=(3, 5))
    plan = fake_parity(tmp_path, looks, gaps=gaps, skip={(arm, seed) for arm in gaps for seed in (3, 4)})
    train, begun = trains(plan)
    run(plan, tmp_path, monkeypatch, train)
    assert begun == []
    grown = write_or_check_plan(tmp_path, plan_of(candidates=("nvfp4",), seeds=6))
    run(grown, tmp_path, monkeypatch, train)
    assert {seed for _, seed in begun} == {3, 4, 5}


def test_a_parity_that_compiles_says_so():
    said = []
    log = runner.RunLog(io.StringIO(), said.append, every=100)
    log.write("compiling ...\nother\nstill compiling, 0:30\ncompiled in 61.0 s; the program needs 1 GiB\n")
    assert said == ["compiling ...", "still compiling, 0:30", "compiled in 61.0 s"]


def test_run_longer_than_the_plan_is_partial_without_a_validation_at_the_last_step(tmp_path):
    """Rows of steps after the planned last one are no outcome of the plan."""
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 10, "loss": 3.0}\n{"step": 12, "loss": 3.0, "validation_loss": 3.0}\n'
    )
    status = run_status(tmp_path, 10)
    assert (status.state, status.step, status.loss) == (RUN_PARTIAL, 12, None)
    assert run_status(tmp_path, 12).state == RUN_DONE
