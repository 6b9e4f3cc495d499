"""`halfbyte playbook` as typed, on a tiny model that is really trained. Oracle: the commands that its page names."""

import dataclasses
import html
import itertools
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation_diagnosis"))
import defects
import planted

from halfbyte.checkpoint import RunLock
from halfbyte.cli import bench, doctor, inspect, parity, plan, playbook_stages
from halfbyte.cli import playbook as playbook_command
from halfbyte.cli.console import CommandResult
from halfbyte.cli.main import main
from halfbyte.io import dataclass_json
from halfbyte.plan.step_timing import StepMeasurement
from halfbyte.study import STAGES, StageRecords, runner
from halfbyte.train import CheckpointConfig, OptimizerConfig, loop

# What was asked for by number is run, whatever the budget; nothing else fits.
FLAGS = (
    "--baseline",
    "bf16",
    "--candidates",
    "nvfp4",
    "--no-controls",
    "--seeds",
    "1",
    "--steps",
    "6",
    "--budget",
    "1s",
)
POLICY = "mlp/down"  # one linear: what is quantized is most of what is compiled
NOISE = {"wanted": 12.0, "policy": POLICY, "step": 20, "batches": 1, "operands": [],
         "gemms": [{"layer": 0, "site": "mlp/down", "gemm": "wgrad", "snr_db": 13.6}]}  # fmt: skip
"""What `inspect` gives. It, `bench` and `doctor` compile for long, and have tests of their own."""


@pytest.fixture(autouse=True, scope="module")
def _quick(one_cache, one_device):
    """Compiling is most of what these tests cost."""


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    base = planted.fakes.BASE
    small = dataclasses.replace(
        base, model=base.model.replace(layers=1), policy=POLICY, checkpoint=CheckpointConfig(every=2),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup=1, schedule="constant"),  # of any length, one program
    )  # fmt: skip
    path = tmp_path_factory.mktemp("config") / "tiny.json"
    dataclass_json.save_config(small, path)
    return path


def playbook(config_file, out, *flags):
    return main(["playbook", str(config_file), "--out", str(out), *FLAGS, *flags])


def interrupted(*_, **__):
    raise KeyboardInterrupt


def kept(out):
    return {path.name: path.read_bytes() for path in sorted((out / "records").glob("*.json"))}


def measured(args):
    """What `bench` gives."""
    rows = [StepMeasurement(name, args.policy, args.remat, "emulated", 8, 20.0 + at, tokens_per_s=500.0, tflops=0.01,
                     needed_gib=0.1, compile_s=2.0) for at, name in enumerate(args.recipes.split(","))]  # fmt: skip
    return CommandResult({"rows": [dataclasses.asdict(row) for row in rows], **bench.bench_versions()})


def late(real):
    """Data that comes late."""

    def stalled(*args, **options):
        time.sleep(0.3)
        return real(*args, **options)

    return stalled


@pytest.fixture(scope="module")
def stopped_everywhere(config_file, tmp_path_factory):
    """A playbook that was stopped at the beginning of every stage and inside its study, and went on each time. Weight
    gradients are too small in it, and the study's input stalls."""
    out = tmp_path_factory.mktemp("playbook") / "p"
    real, calls, seen = runner.train, [], {}

    def once(config, folder, **options):
        calls.append(folder)
        return interrupted() if len(calls) == 2 else real(config, folder, **options)

    jax.clear_caches()
    with pytest.MonkeyPatch.context() as always, defects.gain_088():
        always.setattr(playbook_stages, "PRE_STUDY_FRACTION", 1e9)  # of a second
        always.setattr(inspect, "run", lambda args: CommandResult(NOISE))
        always.setattr(bench, "run", measured)
        always.setattr(doctor, "run", lambda args: CommandResult({"passed": True, "checks": []}))
        for stage in STAGES:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(playbook_stages.Playbook, stage, interrupted)
                assert playbook(config_file, out) == 75, stage
            now = kept(out)
            assert (out / "playbook.html").is_file() and len(now) == STAGES.index(
                stage
            ) + 2  # settings; the stopped one
            assert {name: now[name] for name in seen} == seen  # what is written stays
            seen = {name: now[name] for name in list(now)[:-1]}
            if stage == "parity":
                always.setattr(loop, "make_global_batch", late(loop.make_global_batch))
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(runner, "train", once)
                    assert playbook(config_file, out) == 75
        assert len(calls) == 2 and playbook(config_file, out) == 0
    jax.clear_caches()
    return out


def test_stopped_at_every_stage_it_goes_on_and_gives_one_page(stopped_everywhere, config_file, one_cache):
    out = stopped_everywhere
    assert set(one_cache) == {out / "study" / "compiled"}
    before, pages = kept(out), {name: (out / name).read_bytes() for name in ("playbook.html", "playbook.json")}
    for flags in ((), ("--report",)):  # nothing is left to do
        assert playbook(config_file, out, *flags) == 0
        assert kept(out) == before and {name: (out / name).read_bytes() for name in pages} == pages
    assert {path.name for path in (out / "study" / "arms").iterdir()} == {"bf16", "nvfp4"}
    found = json.loads((out / "playbook.json").read_text())
    assert found["decision"]["word"] == "DO NOT SWITCH"
    assert "radar" in found["decision"]["sentence"] and "wgrad" in found["decision"]["sentence"]
    assert [stage for stage in STAGES if "missing" in found["records"][stage]] == ["eval", "cluster"]
    verdicts = {point["what"]: point["verdict"] for point in found["points"]}
    assert verdicts["input wait, of a step"] == "FAIL" and "not the recipe's" in found["decision"]["speed"]
    assert "of a step: gemm" in verdicts and verdicts["radar: alarms"] == "FAIL"


@pytest.mark.slow
def test_its_figures_are_those_of_the_commands_that_it_names(stopped_everywhere, capfd):
    out, records = stopped_everywhere, StageRecords(stopped_everywhere / "records")
    again = {}
    for stage in ("parity", "compare"):
        capfd.readouterr()
        main([*shlex.split(records.get(stage)["command"])[1:], "--json", *["--report"] * (stage == "parity")])
        again[stage] = json.loads(capfd.readouterr().out)
    study, compared = records.data("parity"), records.data("compare")
    assert again["parity"]["arms"] == study["arms"] and again["parity"]["verdict"] == study["verdict"]
    assert again["compare"]["runs"] == [{k: v for k, v in run.items() if k != "arm"} for run in compared["runs"]]
    points = {p["what"]: p for p in json.loads((out / "playbook.json").read_text())["points"]}
    page = (out / "playbook.html").read_text()
    for arm, run in zip(again["parity"]["arms"], again["compare"]["runs"], strict=True):
        loss = f"{arm['final']['0']:.4f}"
        assert points["validation loss, nats a token"]["values"][arm["name"]] == loss and loss in page
        assert points["input wait, of a step"]["values"][arm["name"]] == f"{run['speed']['input_wait']:.1%}"
    for row in records.data("bench")["rows"]:
        assert points["step alone, ms"]["values"][row["arm"]] == f"{row['milliseconds']:.1f}"
    assert all(html.escape(point["command"], quote=True) in page for point in points.values())


@pytest.mark.slow
def test_killed_in_its_short_run_it_goes_on(config_file, tmp_path, monkeypatch):
    """SIGKILL in `trace`: what is over stays, half a trace is removed, and the stage is run again."""
    out, trace = tmp_path / "p", tmp_path / "p" / "trace"
    command = [sys.executable, "-m", "halfbyte", "playbook", str(config_file), "--out", str(out), *FLAGS]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 300
        while not (trace / "config.json").is_file() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
    before = kept(out)
    assert list(before) == ["00-settings.json", "01-doctor.json", "02-preflight.json"] and trace.is_dir()
    (trace / "half").write_text("of the start that was killed")
    monkeypatch.setattr(playbook_stages.Playbook, "inspect", interrupted)
    assert playbook(config_file, out) == 75
    after = kept(out)
    assert {name: after[name] for name in before} == before and not (trace / "half").exists()
    assert json.loads(after["03-trace.json"])["data"]["step_time_s"] > 0


def work_in(folder, config_file, **flags):
    """A playbook of which nothing was run."""
    return playbook_stages.Playbook(playbook_command.Args(model=str(config_file), out=str(folder), **flags))


def put(work, **results):
    """Write the records of stages, in their order."""
    for stage in STAGES:
        if stage in results:
            work.records.put(stage, seconds=20.0, command=f"halfbyte {stage}", data=results[stage])


ROWS = [{"arm": name, "milliseconds": 100.0, "compile_s": 10.0} for name in planted.ARMS]
MEASURED = {
    "trace": {"arm": "nvfp4", "recipe": "nvfp4", "policy": "mlp", "seconds": 20.0, "stepping_s": 2.0,
              "step_time_s": 0.1},
    "bench": {"baseline": "fp8", "rows": ROWS},
}  # fmt: skip
HALF = {"complete": False, "runs": {"done": 7, "planned": 15}}


@pytest.mark.parametrize("flags, within", [({}, "300s"), ({"steps": 6}, ""), ({"host": "0/2"}, "")])
def test_a_study_of_the_budgets_size_ends_with_it(config_file, tmp_path, monkeypatch, flags, within):
    """What was asked for by number, or is shared with other hosts, is not cut off: the same command goes on."""
    asked = []
    monkeypatch.setattr(parity, "run", lambda args: asked.append(args) or CommandResult(HALF))
    work = work_in(tmp_path, config_file, **flags)
    put(work, plan={"seeds": 3, "steps": 30, "before_s": (1 - playbook_stages.RESERVE) * 1800 - 300.2})
    if within:
        command, data = work.parity()
        assert data == HALF | {"ended_by": 1800} and f"--within {within}" in command
    else:
        with pytest.raises(playbook_stages.StageInterruptedError):
            work.parity()
    assert [(args.within, args.host) for args in asked] == [(within, flags.get("host", ""))]


def test_all_starts_count_and_a_larger_budget_opens_a_cut_study(config_file, tmp_path, monkeypatch):
    work = work_in(tmp_path, config_file, budget="10m")
    monkeypatch.setattr(
        playbook_stages, "time", SimpleNamespace(perf_counter=itertools.count().__next__)
    )  # each start: 1 s
    put(work, plan={"seeds": 3, "steps": 30, "before_s": 100.0})
    work.records.put("parity", seconds=40.0)
    monkeypatch.setattr(playbook_stages.Playbook, "parity", interrupted)
    with pytest.raises(KeyboardInterrupt):
        work.run_stage("parity")
    assert work.records.seconds("parity") == 41 and not work.records.is_over("parity", 600)
    monkeypatch.setattr(
        playbook_stages.Playbook, "parity", lambda work: ("halfbyte parity", HALF | {"ended_by": 600.0})
    )
    work.run_stage("parity")
    assert work.records.seconds("parity") == 42 and work.records.data("parity") == HALF
    work.records.put("eval", seconds=1.0, missing="no tasks")
    assert work.records.is_over("parity", 600.0) and not work.records.is_over("parity", 1200.0)
    work.run_stage("parity")
    assert work.records.seconds("parity") == 43
    assert not work.records.is_over("eval", 600.0) and work.records.is_over("plan", 1200.0)


def test_a_larger_budget_plans_a_study_that_had_no_time(config_file, tmp_path):
    work = work_in(tmp_path, config_file, budget="1m")
    put(work, **MEASURED)
    for stage in ("plan", "parity"):
        work.run_stage(stage)
    assert "no time" in work.records.get("parity")["missing"]
    assert work.records.is_over("plan", 60.0) and work.records.is_over("parity", 60.0)
    larger = work_in(tmp_path, config_file, budget="1h")
    assert not larger.records.is_over("plan", larger.budget)
    larger.run_stage("plan")
    assert larger.records.data("plan")["seeds"] >= 3 and larger.records.is_over("plan", 7200.0)
    assert not larger.records.is_over("parity", 3600.0) and larger.records.is_over("bench", 3600.0)


@pytest.mark.slow
def test_two_starts_at_once_are_one_and_a_report_is_made_beside_it(config_file, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(playbook_stages.Playbook, "doctor", interrupted)
    assert playbook(config_file, tmp_path / "p") == 75  # leaves nobody's lock
    with RunLock(tmp_path / "p"):
        assert playbook(config_file, tmp_path / "p") == 2
        said = " ".join(capfd.readouterr().err.split())
        assert "is held by another process" in said and "--out another directory" in said
        assert playbook(config_file, tmp_path / "p", "--report") == 0


@pytest.mark.parametrize("flags, words", [
    ({}, []), ({"data": "synthetic", "batch": 4, "mesh": "fsdp=1"},
               ["--data", "synthetic", "--batch", "4", "--mesh", "fsdp=1"]),
])  # fmt: skip
def test_the_commands_that_it_names_have_its_data_and_batch(config_file, tmp_path, flags, words):
    assert work_in(tmp_path, config_file, **flags).train_words() == ["--config", str(config_file), *words]


def test_the_cluster_is_planned_with_the_candidates_policy(config_file, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(plan, "run", lambda args: asked.append(args) or CommandResult({}))
    work = work_in(tmp_path, config_file, candidates="nvfp4@all_linear", device="gb300", count=8)
    command, _ = work.cluster()
    assert asked[0].policy == "all_linear" and "--policy all_linear" in command


@pytest.mark.parametrize("controls, arms", [(True, 5), (False, 3)])
def test_the_plan_counts_the_arms_that_will_run(config_file, tmp_path, controls, arms):
    work = work_in(tmp_path, config_file, controls=controls)
    put(work, **MEASURED)
    costs = work.plan()[1]["costs"]
    assert costs == pytest.approx({"first_s": 0.0, "again_s": arms * (10 + 8), "step_s": arms * 0.1})


@pytest.mark.parametrize("flags, left, seeds, steps, ends", [
    ({}, 3 * (90 + 0.5 * 40), 3, 40, False), ({}, 7.1 * (90 + 0.5 * 60), 7, 60, False), ({}, 1e5, 12, 60, False),
    ({}, 100, 3, 30, False), ({}, 20, 3, 30, True), ({"seeds": 1}, 90 + 0.5 * 50, 1, 50, False),
    ({"steps": 500}, 20, 3, 500, False), ({"host": "0/2"}, 3 * (90 + 0.5 * 40) / 2, 3, 40, False),
])  # fmt: skip
def test_seeds_come_first_then_steps_then_more_seeds(config_file, tmp_path, flags, left, seeds, steps, ends):
    """Five arms at 18 s a run and 0.1 s a step, of 60 steps at most; `ends`: not even one run has time."""
    budget = (left + 40.01) / (1 - playbook_stages.RESERVE)  # 40 s: what bench and the short run took
    work = work_in(tmp_path, config_file, budget=f"{budget:.3f}s", **flags)
    put(work, **MEASURED)
    work.run_stage("plan")
    planned, record = work.records.data("plan"), work.records.get("plan")
    assert (planned["seeds"], planned["steps"]) == (seeds, steps) and bool(record["ended_by"]) == ends
    assert planned["seconds"] == pytest.approx(seeds * (90 + 0.5 * steps))


def test_the_plan_costs_what_a_study_was_measured_to_take(config_file, tmp_path):
    """The demo's records on two cores; its 15 runs of 35 steps would have taken 740 s."""
    row = {"fp8": (369, 14.4), "nvfp4": (689, 33.6), "nvfp4_no_rht": (372, 21.4)}
    rows = [{"arm": arm, "milliseconds": step, "compile_s": compiling} for arm, (step, compiling) in row.items()]
    short = MEASURED["trace"] | {"seconds": 60.8, "stepping_s": 12.3, "step_time_s": 0.418}
    work = work_in(tmp_path, config_file, seeds=3, steps=35)
    put(work, trace=short, bench={"baseline": "fp8", "rows": rows})
    assert 660 < work.plan()[1]["seconds"] < 900


def test_what_inspect_suggests_joins_as_a_candidate(config_file, tmp_path):
    work = work_in(tmp_path, config_file)
    for policy, joined in (("mlp", []), ("*=bf16", []), ("mlp; mlp/down=bf16", ["nvfp4@mlp; mlp/down=bf16"])):
        put(work, trace=MEASURED["trace"], inspect={**NOISE, "policy": policy})
        assert work.candidates() == ["nvfp4", "nvfp4_no_rht", *joined]
    assert list(work.configs().values())[-1].policy == "mlp; mlp/down=bf16"


@pytest.mark.slow(
    fast_cases=["flags6-gb9000", "flags8-0 or more", "flags10-holds no playbook", "flags1-The least is --budget 1m"]
)
@pytest.mark.parametrize(
    "flags, message",
    [
        (["--budget", "12"], "budget must be a time"),
        (["--budget", "59s", "--steps", "0"], "The least is --budget 1m"),
        (["--candidates", "nvfp5"], "no recipe named"),
        (["--baseline", "bf17"], "no recipe named"),
        (["--margin", "0.5"], "with its unit"),
        (["--host", "2/2"], "INDEX/HOSTS"),
        (["--device", "gb9000"], "gb9000"),
        (["--seeds", "-1"], "1 or more"),
        (["--limit", "-1"], "0 or more"),
        (["--tasks", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--report"], "holds no playbook"),
    ],
)
def test_bad_input_exits_2_and_leaves_nothing(config_file, tmp_path, capfd, flags, message):
    assert playbook(config_file, tmp_path / "p", *flags) == 2
    assert message in " ".join(capfd.readouterr().err.split())
    assert not (tmp_path / "p").exists()


def test_a_time_without_a_unit_is_refused_before_anything_is_written(config_file, tmp_path, capfd):
    assert main(["parity", str(config_file), "--out", str(tmp_path / "p"), "--within", "12"]) == 2
    assert "within must be a time" in " ".join(capfd.readouterr().err.split()) and not (tmp_path / "p").exists()


def test_another_question_in_the_same_directory_is_refused(config_file, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(playbook_stages.Playbook, "doctor", interrupted)
    assert playbook(config_file, tmp_path / "p") == 75
    assert playbook(config_file, tmp_path / "p", "--margin", "1%") == 2
    assert "was begun with margin" in " ".join(capfd.readouterr().err.split())


def test_other_hosts_are_told_the_study_to_run(config_file, tmp_path, capfd):
    for host in ("1/2", "90/91"):
        assert playbook(config_file, tmp_path / "p", "--host", host) == 2
        said = " ".join(capfd.readouterr().err.split())
        assert f"--host {host}" in said and "06-plan.json" in said and not (tmp_path / "p").exists()


def test_directory_that_holds_something_else_is_refused(config_file, tmp_path, capfd):
    """Its stages replace `trace` and other names of their directory."""
    (tmp_path / "project" / "trace").mkdir(parents=True)
    (tmp_path / "project" / "trace" / "mine").write_text("precious")
    assert playbook(config_file, tmp_path / "project") == 2
    assert "is not empty (trace) and holds no playbook" in " ".join(capfd.readouterr().err.split())
    assert (tmp_path / "project" / "trace" / "mine").read_text() == "precious"
