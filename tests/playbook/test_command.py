"""`halfbyte playbook` as typed, on a tiny model that is really trained. Oracle: the commands that its page names."""

import dataclasses
import html
import itertools
import json
import shlex
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "diagnosis"))
import defects
import planted

from halfbyte.bench import Measured
from halfbyte.checkpoint import RunLock
from halfbyte.cli import bench, doctor, inspect, parity, plan, stages
from halfbyte.cli import playbook as playbook_command
from halfbyte.cli.main import main
from halfbyte.cli.result import Result
from halfbyte.optim import OptimizerConfig
from halfbyte.parity import runner
from halfbyte.playbook import STAGES, Records
from halfbyte.playbook.budget import RESERVE
from halfbyte.train import CheckpointConfig, jsonconfig, loop

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
    jsonconfig.save(small, path)
    return path


def playbook(config_file, out, *flags):
    return main(["playbook", str(config_file), "--out", str(out), *FLAGS, *flags])


def interrupted(*_, **__):
    raise KeyboardInterrupt


def kept(out):
    return {path.name: path.read_bytes() for path in sorted((out / "records").glob("*.json"))}


def measured(args):
    """What `bench` gives."""
    rows = [Measured(name, args.policy, args.remat, "carrier", 8, 20.0 + at, tokens_per_s=500.0, tflops=0.01,
                     needed_gib=0.1, compile_s=2.0) for at, name in enumerate(args.recipes.split(","))]  # fmt: skip
    return Result({"rows": [dataclasses.asdict(row) for row in rows], **bench.versions()})


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
        always.setattr(stages, "BEFORE", 1e9)  # of a second
        always.setattr(inspect, "run", lambda args: Result(NOISE))
        always.setattr(bench, "run", measured)
        always.setattr(doctor, "run", lambda args: Result({"passed": True, "checks": []}))
        for stage in STAGES:
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(stages.RUN, stage, interrupted)
                assert playbook(config_file, out) == 75, stage
            now = kept(out)
            assert (out / "playbook.html").is_file() and len(now) == STAGES.index(stage) + 1
            assert {name: now[name] for name in seen} == seen  # what is written stays
            seen = now
            if stage == "parity":
                always.setattr(loop, "to_mesh", late(loop.to_mesh))
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(runner, "train", once)
                    assert playbook(config_file, out) == 75
        assert len(calls) == 2 and playbook(config_file, out) == 0
    jax.clear_caches()
    return out


def test_stopped_at_every_stage_it_goes_on_and_gives_one_page(stopped_everywhere, config_file, one_cache):
    out = stopped_everywhere
    assert set(one_cache) == {out / "study" / "compiled"}
    before, pages = kept(out), {name: (out / name).read_bytes() for name in ("playbook.html", "playbook.md")}
    for flags in ((), ("--report",)):  # nothing is left to do
        assert playbook(config_file, out, *flags) == 0
        assert kept(out) == before and {name: (out / name).read_bytes() for name in pages} == pages
    assert {path.name for path in (out / "study" / "arms").iterdir()} == {"bf16", "nvfp4"}
    found = json.loads((out / "playbook.json").read_text())
    assert found["decision"]["word"] == "DO NOT SWITCH"
    assert "radar" in found["decision"]["sentence"] and "wgrad" in found["decision"]["sentence"]
    assert {line["what"] for line in found["not_tried"]} == {"Downstream scores", "The cluster", "Ablation"}
    verdicts = {point["what"]: point["verdict"] for point in found["points"]}
    assert verdicts["input wait, of a step"] == "FAIL" and "not the recipe's" in found["decision"]["speed"]
    assert "of a step: gemm" in verdicts and verdicts["radar: alarms"] == "FAIL"


@pytest.mark.slow
def test_its_figures_are_those_of_the_commands_that_it_names(stopped_everywhere, capfd):
    out, records = stopped_everywhere, Records(stopped_everywhere / "records")
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


@pytest.mark.parametrize("flags, within", [({}, "300s"), ({"steps": 6}, ""), ({"host": "0/2"}, "")])
def test_a_study_of_the_budgets_size_ends_with_it(config_file, tmp_path, monkeypatch, flags, within):
    """What was asked for by number, or is shared with other hosts, is not cut off: the same command goes on."""
    asked, half = [], {"complete": False, "runs": {"done": 7, "planned": 15}}
    monkeypatch.setattr(parity, "run", lambda args: asked.append(args) or Result(half))
    args = playbook_command.Args(model=str(config_file), **flags)
    work = stages.Work(args, planted.fakes.BASE, tmp_path, Records(tmp_path))
    before = (1 - RESERVE) * 1800 - 300.2
    work.records.put("plan", {"data": {"seeds": 3, "steps": 30, "before_s": before}})
    if within:
        command, data = stages.parity(work)
        assert data == half | {"within_s": pytest.approx(300.2)} and f"--within {within}" in command
    else:
        with pytest.raises(stages.Stopped):
            stages.parity(work)
    assert [args.within for args in asked] == [within]


def test_all_starts_count_and_a_larger_budget_opens_a_cut_study(config_file, tmp_path, monkeypatch):
    args = playbook_command.Args(model=str(config_file), budget="10m")
    work = stages.Work(args, planted.fakes.BASE, tmp_path, Records(tmp_path / "records"))
    half = {"complete": False, "runs": {"done": 7, "planned": 15}}
    monkeypatch.setitem(stages.RUN, "parity", interrupted)
    monkeypatch.setattr(stages, "time", SimpleNamespace(perf_counter=itertools.count().__next__))  # each start: 1 s
    work.records.put("plan", {"data": {"seeds": 3, "steps": 30, "before_s": 100.0}})
    work.records.spend("parity", 40.0)
    with pytest.raises(KeyboardInterrupt):
        stages.run_stage("parity", work)
    assert work.records.spent("parity") == 41
    monkeypatch.setitem(stages.RUN, "parity", lambda work: ("halfbyte parity", half | {"within_s": 452.0}))
    stages.run_stage("parity", work)
    assert work.records.get("parity")["seconds"] == 42
    work.records.put("eval", {"seconds": 1.0, "missing": "no tasks"})
    stages.reopen_study(work)
    assert work.records.get("parity")  # the same budget opens nothing
    stages.reopen_study(dataclasses.replace(work, args=dataclasses.replace(args, budget="20m")))
    assert work.records.get("parity") is work.records.get("eval") is None and work.records.get("plan")
    assert work.records.spent("parity") >= 40


def test_a_larger_budget_plans_a_study_that_had_no_room(config_file, tmp_path):
    args = playbook_command.Args(model=str(config_file), budget="1m")
    work = stages.Work(args, planted.fakes.BASE, tmp_path, Records(tmp_path / "records"))
    rows = [{"arm": name, "milliseconds": 100.0, "compile_s": 10.0} for name in planted.ARMS]
    short = {"arm": "nvfp4", "seconds": 20.0, "stepping_s": 2.0, "step_time_s": 0.1}
    for stage, data in (("bench", {"baseline": "fp8", "rows": rows}), ("trace", short)):
        work.records.put(stage, {"seconds": 20.0, "data": data})
    for stage in ("plan", "parity"):
        stages.run_stage(stage, work)
    assert work.records.data("plan")["seeds"] == 0 and "no room" in work.records.get("parity")["missing"]
    stages.reopen_study(work)
    assert work.records.get("parity")  # the same budget opens nothing
    larger = dataclasses.replace(work, args=dataclasses.replace(args, budget="1h"))
    stages.reopen_study(larger)
    assert work.records.get("plan") is work.records.get("parity") is None and work.records.get("bench")
    stages.run_stage("plan", larger)
    assert work.records.data("plan")["seeds"] >= 3


@pytest.mark.slow
def test_two_starts_at_once_are_one_and_a_report_is_made_beside_it(config_file, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(stages.RUN, "doctor", interrupted)
    assert playbook(config_file, tmp_path / "p") == 75  # leaves nobody's lock
    with RunLock(tmp_path / "p"):
        assert playbook(config_file, tmp_path / "p") == 2
        said = " ".join(capfd.readouterr().err.split())
        assert "is held by another process" in said and "--out another directory" in said
        assert playbook(config_file, tmp_path / "p", "--report") == 0
        assert playbook(config_file, tmp_path / "p", "--host", "1/2") == 75  # of the same question


@pytest.mark.parametrize(
    "flags, words",
    [
        ({}, "--config {config}"),
        (
            {"data": "my data", "batch": 4, "mesh": "fsdp=2"},
            "--config {config} --data 'my data' --batch 4 --mesh fsdp=2",
        ),
    ],
)
def test_the_commands_that_it_names_have_its_data_and_batch(config_file, flags, words):
    args = playbook_command.Args(model=str(config_file), **flags)
    assert stages.run_words(args) == words.format(config=config_file)


def test_the_commands_that_it_names_start_from_what_it_was_given(tmp_path, monkeypatch):
    """A run of ours whatever lies beside it, a run directory's config, and the weights of a Hugging Face folder."""
    monkeypatch.chdir(tmp_path)
    for name, content in {"demo": "{}", "run": "{}", "folder": '{"model_type": "llama"}'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    words = [stages.run_words(playbook_command.Args(model=name)) for name in ("demo", "run", "folder")]
    assert words == ["demo", "--config run/config.json", "--init-from folder"]


def test_the_cluster_is_planned_with_the_candidates_policy(config_file, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(plan, "run", lambda args: asked.append(args) or Result({}))
    args = playbook_command.Args(model=str(config_file), candidates="nvfp4@all_linear", device="gb300", count=8)
    command, _ = stages.cluster(stages.Work(args, planted.fakes.BASE, tmp_path, Records(tmp_path)))
    assert asked[0].policy == "all_linear" and "--policy all_linear" in command


@pytest.mark.slow
@pytest.mark.parametrize("controls, arms", [(True, 5), (False, 3)])
def test_the_plan_counts_the_arms_that_will_run(config_file, tmp_path, controls, arms):
    args = playbook_command.Args(model=str(config_file), controls=controls)
    work = stages.Work(args, planted.fakes.BASE, tmp_path, Records(tmp_path))
    rows = [{"arm": name, "milliseconds": 100.0, "compile_s": 1.0} for name in planted.ARMS]
    short = {"arm": "nvfp4", "seconds": 3.0, "stepping_s": 2.0, "step_time_s": 0.1}
    for stage, data in (("bench", {"baseline": "fp8", "rows": rows}), ("trace", short)):
        work.records.put(stage, {"seconds": 1.0, "data": data})
    planned = stages.plan(work)[1]
    assert len(planned["arms"]) == arms and planned["costs"]["step_s"] == pytest.approx(arms * 0.1)


def test_what_inspect_suggests_joins_as_a_candidate(tmp_path):
    records, args = Records(tmp_path), SimpleNamespace(candidates="nvfp4, nvfp4_no_rht", baseline="fp8")
    work = stages.Work(args, planted.fakes.BASE, tmp_path, records)
    records.put("trace", {"data": {"recipe": "nvfp4", "policy": "mlp"}})
    for policy, joined in (("mlp", []), ("*=bf16", []), ("mlp; mlp/down=bf16", ["nvfp4@mlp; mlp/down=bf16"])):
        records.put("inspect", {"data": {**NOISE, "policy": policy}})
        assert work.candidates() == ["nvfp4", "nvfp4_no_rht", *joined]
    assert work.arms()[-1].changes == {"recipe": "nvfp4", "policy": "mlp; mlp/down=bf16"}


@pytest.mark.slow(
    fast_cases=["flags6-gb9000", "flags7-0 or more", "flags9-holds no records", "flags1-The least is --budget 1m"]
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
        (["--seeds", "-1"], "0 or more"),
        (["--tasks", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--report"], "holds no records"),
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
    monkeypatch.setitem(stages.RUN, "doctor", interrupted)
    assert playbook(config_file, tmp_path / "p") == 75
    assert playbook(config_file, tmp_path / "p", "--margin", "1%") == 2
    assert "was begun with margin" in " ".join(capfd.readouterr().err.split())


def test_other_hosts_wait_for_the_first(config_file, tmp_path, capfd):
    assert playbook(config_file, tmp_path / "p", "--host", "1/2") == 75
    assert "host 0" in capfd.readouterr().out


def test_directory_that_holds_something_else_is_refused(config_file, tmp_path, capfd):
    """Its stages replace `trace` and other names of their directory."""
    (tmp_path / "project" / "trace").mkdir(parents=True)
    (tmp_path / "project" / "trace" / "mine").write_text("precious")
    assert playbook(config_file, tmp_path / "project") == 2
    assert "is not empty (trace) and holds no playbook" in " ".join(capfd.readouterr().err.split())
    assert (tmp_path / "project" / "trace" / "mine").read_text() == "precious"
