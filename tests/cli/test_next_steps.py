"""What `train` prints to try next is true. Oracles: the config of the run that printed it, and the commands' own
parsers."""

import dataclasses
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import halfbyte as hb
from halfbyte.cli import compare, data, generate, parity
from halfbyte.cli.main import parse_flags
from halfbyte.cli.run_summary import describe_loss_difference, has_quantized_linears, program_name, suggest_next_steps
from halfbyte.cli.train import parse, rerun_flags
from halfbyte.io import dataclass_json
from halfbyte.models import linear_sites
from halfbyte.recipes import policy, recipe
from halfbyte.train.run_directory import open_run_directory

DEMO = hb.run_config("demo")


def printed(run):
    """The commands under `what to try next`, as a shell splits them, without the program."""
    text = (run.parent / "stdout.txt").read_text(encoding="utf-8").partition("what to try next:\n")[2]
    start = f"{sys.executable} -m halfbyte "
    lines = [line.strip() for line in text.splitlines() if not line.strip().startswith("#")]
    assert lines and all(line.startswith(start) for line in lines)
    return [shlex.split(line.removeprefix(start)) for line in lines]


def by_command(commands):
    return {name: [words for first, *words in commands if first == name] for name in {words[0] for words in commands}}


def test_what_a_run_prints_reproduces_it(tiny_run):
    config = open_run_directory(tiny_run).config
    found = by_command(printed(tiny_run))
    other, on = map(parse, found["train"])
    assert other.run == dataclasses.replace(config, recipe="bf16") and other.run_dir == f"{tiny_run}-bf16"
    assert on.run == dataclasses.replace(config, steps=8) and on.run_dir == str(tiny_run)
    assert parse_flags("compare", compare, found["compare"][0]).runs == (f"{tiny_run}-bf16", str(tiny_run))
    assert parse_flags("generate", generate, found["generate"][0]).run == str(tiny_run)


@pytest.mark.slow
def test_a_run_on_the_embedded_text_is_offered_on_own_text(tmp_path):
    dataclass_json.save_config(DEMO, tmp_path / "config.json")
    prepare, train = suggest_next_steps(DEMO, tmp_path)[-1][1]
    own, prepared = parse(list(train[1:])), parse_flags("data", data, list(prepare[1:]))
    assert own.run == dataclasses.replace(DEMO, data="data/own") and own.run_dir == ""
    assert prepared.tokenizer == f"bpe:{DEMO.model.vocab_size}" and prepared.out == own.run.data


def test_the_parity_that_a_run_prints_compares_its_recipe_with_bf16(tiny_run):
    (words,) = by_command(printed(tiny_run))["parity"]
    plan, out = parity.make_study_plan(parse_flags("parity", parity, words))
    config = open_run_directory(tiny_run).config
    made = {arm.kind: arm.configure(plan.base, 0).recipe for arm in plan.arms}
    assert (made["baseline"], made["candidate"]) == ("bf16", "nvfp4") and len(plan.seeds) == 3
    assert (plan.base.model, plan.base.data, plan.base.steps) == (config.model, config.data, config.steps)
    assert out == Path(f"{tiny_run}-parity")


@pytest.mark.parametrize("source, writes, prepares", [("demo", 1, 1), ("synthetic", 0, 1), ("mine:2,b:1", 1, 0)])
def test_what_is_offered_can_be_done_with_the_data(tmp_path, source, writes, prepares):
    """Synthetic tokens are no text to write on from, and who has trained on own text needs no advice to."""
    config = dataclasses.replace(DEMO, data=source)
    names = [words[0] for _, commands in suggest_next_steps(config, tmp_path) for words in commands]
    assert (names.count("generate"), names.count("data")) == (writes, prepares)
    assert names.count("train") == 2 + prepares and names.count("parity") == 1


def test_only_what_is_there_is_said_to_be(tiny_run):
    text = (tiny_run.parent / "stdout.txt").read_text(encoding="utf-8")
    (listed,) = (line for line in text.splitlines() if line.startswith(f"run directory: {tiny_run} ("))
    names = listed.partition(" (")[2].removesuffix(")").split(", ")
    assert len(names) > 3 and all((tiny_run / name).exists() for name in names)


@pytest.mark.slow
def test_a_run_in_bf16_is_offered_in_nvfp4(tmp_path):
    dataclass_json.save_config(dataclasses.replace(DEMO, recipe="bf16"), tmp_path / "config.json")
    (train, pair), ((_, _, *flags),) = (
        commands for _, commands in suggest_next_steps(parse_demo(tmp_path), tmp_path)[:2]
    )
    assert parse(list(train[1:])).run == DEMO
    assert pair == ("compare", str(tmp_path), f"{tmp_path}-nvfp4")
    assert flags[:4] == ["--baseline", "bf16", "--candidates", "nvfp4"]


def parse_demo(folder):
    return parse(["--config", str(folder / "config.json")]).run


@pytest.mark.slow
def test_rules_that_name_their_recipes_are_changed_too(tmp_path):
    """`--recipe bf16` alone would leave them in 4 bits."""
    rules = dataclasses.replace(DEMO, policy="mlp/*=nvfp4; layers[-1:]=bf16")
    dataclass_json.save_config(rules, tmp_path / "config.json")
    assert has_quantized_linears(rules, "bf16")
    steps = suggest_next_steps(parse_demo(tmp_path), tmp_path)
    plain = parse(list(steps[0][1][0][1:])).run
    sites = policy(plain.policy, recipe(plain.recipe)).resolve(linear_sites(plain.model), plain.model.layers)
    assert not any(made.quantized for part in sites.segments for made in part.recipes.values())
    assert dataclasses.replace(plain, recipe=rules.recipe, policy=rules.policy) == rules
    plan, _ = parity.make_study_plan(parse_flags("parity", parity, list(steps[1][1][0][1:])))
    assert not has_quantized_linears(plan.arms[0].configure(plan.base, 0), "bf16")


def test_a_recipe_that_is_spelled_out_has_no_study(tmp_path):
    """Candidates are separated by commas, which it has."""
    own = dataclasses.replace(DEMO, recipe=dataclasses.replace(hb.recipe("nvfp4"), name="mine"))
    names = [words[0] for _, commands in suggest_next_steps(own, tmp_path) for words in commands]
    assert "parity" not in names and names.count("train") == 3


def test_what_the_config_does_not_hold_is_carried_along(tmp_path):
    args = parse(["demo", "--distributed.cpu-devices", "4", "--mesh", "fsdp=4", "--xla-flags", "none"])
    dataclass_json.save_config(args.run, tmp_path / "config.json")
    steps = suggest_next_steps(args.run, tmp_path, started=rerun_flags(args))
    again = parse(list(steps[0][1][0][1:]))
    assert (again.distributed, again.xla_flags) == (args.distributed, args.xla_flags)
    assert again.run == dataclasses.replace(args.run, recipe="bf16")


@pytest.mark.parametrize("vocabulary, seq", [(1024, 128), (50_000, 4096)])
def test_what_preparing_prints_fits_the_data(vocabulary, seq):
    rows = SimpleNamespace(tokens=40 * seq, rows=40)
    manifest = SimpleNamespace(vocab_size=vocabulary, seq_len=seq, splits={"train": {"default": rows}})
    words, takes = data.train_on(Path("my data"), manifest)
    assert "on this machine" in takes
    made = parse(shlex.split(shlex.join(words))[1:]).run
    assert (made.data, made.seq) == ("my data", seq)
    assert made.model.vocab_size >= vocabulary and made.model.max_seq >= seq


@pytest.mark.parametrize("on_path, wanted", [(True, "halfbyte"), (False, "bin/halfbyte")])
def test_the_program_is_named_as_the_shell_finds_it(tmp_path, monkeypatch, on_path, wanted):
    script = tmp_path / "bin" / "halfbyte"
    script.parent.mkdir()
    script.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setenv("PATH", str(script.parent) if on_path else "")
    assert program_name() == wanted


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "halfbyte", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"halfbyte {hb.__version__}\n"


def test_a_difference_reads_as_what_it_means():
    assert describe_loss_difference(6.0775, 5.9529) == "this model is 0.125 worse"
    assert describe_loss_difference(3.9, 4.163) == "this model is 0.263 better"
