"""The README: its Python block prints what stands below it, what it shows of commands is their form, and every figure
on it, and on docs/results.md, is computed from a file of evidence that is linked next to it."""

import contextlib
import dataclasses
import io
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy import stats

from halfbyte.models import count_params
from halfbyte.train.run_presets import run_config

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "docs" / "evidence"
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
# Numbers with a unit or a bracket. Names (NVFP4, llama3.1-405b, 8B) and versions are none.
FIGURE = re.compile(r"\[[+-]?\d[\d.+, -]*\]|[+-]?\d+(?:\.\d+)?(?:%|x\b|M\b)|[+-]\d+\.\d+ nats|\b\d+\.\d+\b")
VERSIONS = re.compile(r"(?:Python |JAX |commit |Apache-)[\d.]+[0-9a-f]*")


def read(name):
    return json.loads((EVIDENCE / name).read_text(encoding="utf-8"))


def signed(value, unit="%"):
    return f"{value:+.2f}{unit}"


def interval(values):
    """Mean and 90% interval over seeds (Student's t)."""
    values = np.asarray(values)
    half = stats.t.ppf(0.95, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return values.mean(), values.mean() - half, values.mean() + half


def bracket(low, high, plus="+"):
    return f"[{low:{plus}.2f}, {high:{plus}.2f}]".replace("[+-", "[-")


def grid_gap(size, arm):
    return next(p for p in read("parity/gaps.json")["points"] if (p["size"], p["arm"]) == (size, arm))


def grid(size, arm="nvfp4_all_linear"):
    return signed(grid_gap(size, arm)["interval"]["mean"])


def grid_bracket(arm):
    found = grid_gap("s", arm)["interval"]
    return f"[{found['low']:.2f}, {found['high']:.2f}]"


def paired(runs, arm, baseline="bf16"):
    """Gaps of an arm in percent, seed by seed."""
    loss = {name: run["validation_loss"] for name, run in runs.items()}
    seeds = [seed for seed in range(3) if f"{arm}-{seed}" in loss]
    return [100 * (loss[f"{arm}-{seed}"] / loss[f"{baseline}-{seed}"] - 1) for seed in seeds]


def league(arm, cell="3M@16"):
    """Mean and interval of an arm of the league."""
    mean, low, high = interval(paired(read("league/runs.json")[cell], arm))
    return [signed(mean), bracket(low, high)]


def rows_of(found):
    """Every list of bench rows in a file of evidence."""
    if isinstance(found, dict):
        rows = found.get("rows")
        if isinstance(rows, list) and rows and "milliseconds" in rows[0]:
            yield rows
        for value in found.values():
            yield from rows_of(value)
    elif isinstance(found, list):
        for value in found:
            yield from rows_of(value)


def speeds(name, recipe="nvfp4", digits=2, **wanted):
    """Step time of bf16 over that of a recipe, of each call in a file."""
    ratios = []
    for rows in rows_of(read(name)):
        for row in rows:
            others = [r for r in rows if r["recipe"] == "bf16" and r.get("remat") == row.get("remat")]
            if row["recipe"] == recipe and others and all(row.get(k) == v for k, v in wanted.items()):
                ratios.append(f"{others[0]['milliseconds'] / row['milliseconds']:.{digits}f}x")
    return ratios


def millions(count):
    return f"{count / 1e6:.1f}M"


def size_of_grid(name):
    return millions(int(re.search(r"([\d,]{9,}) parameters", read(f"parity/{name}.json")["scope"])[1].replace(",", "")))


def tokens_per_parameter(size):
    return f"{grid_gap(size, 'nvfp4_all_linear')['tokens_a_parameter']:.1f}"


def largest_trained():
    """The model of loss_nvfp4.json, whose tokenizer has 32,768 entries."""
    (name,) = {run["model"] for run in read("loss_nvfp4.json")["runs"]}
    return dataclasses.replace(run_config(name).model, vocab_size=32768)


def computed():
    """Figure of the README: (the value that its evidence gives, the file that the link next to it names)."""
    halfbyte, nvfp4, runs, gaps = league("remainder_4over6"), league("nvfp4"), "league/runs.json", "parity/gaps.json"

    def speed(name, pick=lambda ratios: ratios[0], **how):
        return pick(speeds(name, **how)), name

    return {
        "+2.66%": (grid("s"), gaps),
        "[1.75, 3.56]": (grid_bracket("nvfp4_all_linear"), gaps),
        "3.2M": (size_of_grid("s"), gaps),
        "16.4": (tokens_per_parameter("s"), gaps),
        "+1.21%": (grid("l"), gaps),
        "23.9M": (size_of_grid("l"), gaps),
        "2.2": (tokens_per_parameter("l"), gaps),
        "+0.38%": (halfbyte[0], runs),
        "[-0.05, +0.81]": (halfbyte[1], runs),
        "+1.81%": (nvfp4[0], runs),
        "3.0M": (millions(read("league/plan.json")["sizes"]["3M"]["parameters"]), runs),
        "0.760x": speed("league/bench_h200_more.json", recipe="halfbyte", digits=3),
        "0.95x": speed("frontier_1b_h200.json", remat="none"),
        "1.01x": speed("steps_one_pipeline_h200.json", max),
        "1.34x": speed("in_place_h200.json", lambda ratios: ratios[-1], recipe="fp8"),
        "0.93x": speed("experts/step_without_loop_h200.json"),
        "0.78x": (f"{read('by_hand_h200.json')['llama-60m']['ratio']:.2f}x", "by_hand_h200.json"),
        "58.9M": (millions(count_params(largest_trained())), "loss_nvfp4.json"),
    }


SMALL = "--steps 2 --model.layers 1 --no-sample"
PUBLISHED = {"1.31x", "1.73x"}  # by others, on the page that the row links to
CONVENTIONS = {"90%", "0.5%"}  # the level of all intervals, the margin of the studies


def blocks(page):
    """Paragraphs, list items and rows of tables, without code."""
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", page, flags=re.S | re.M)
    return [block for block in re.split(r"\n\s*\n|\n(?=[-|\d])", text) if block.strip()]


def figures(block):
    prose = re.sub(r"\]\([^)]*\)", "", re.sub(r"`[^`\n]*`", "", block))
    return FIGURE.findall(VERSIONS.sub("", prose))


def links(block):
    return re.findall(r"\]\(([^)\s]+)\)", block)


def test_every_figure_is_what_the_evidence_gives():
    shown = {figure for block in blocks(PAGE) for figure in figures(block)}
    evidence = computed()
    assert shown - PUBLISHED - CONVENTIONS == set(evidence)
    assert {figure: value for figure, (value, _) in evidence.items() if figure != value} == {}
    for block in blocks(PAGE):
        for figure in set(figures(block)) & evidence.keys():
            assert f"docs/evidence/{evidence[figure][1]}" in links(block), figure


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_every_figure_has_a_link_to_evidence_next_to_it(page):
    """In the same paragraph, list item or table row; by others: a link to their page."""
    path = ROOT / page
    found = [(block, set(figures(block)) - CONVENTIONS) for block in blocks(path.read_text(encoding="utf-8"))]
    assert sum(len(names) for _, names in found) > 15
    for block, names in found:
        wanted = "https://" if names & PUBLISHED else "evidence/"
        near = [link for link in links(block) if wanted in link]
        assert not names or near or is_of_a_linked_section(block, path), (names, block)
        for link in near:
            assert link.startswith("https://") or (path.parent / link).exists(), link


def is_of_a_linked_section(block, path):
    """The losses of the experts' study are a table below the paragraph with its evidence."""
    section = path.read_text(encoding="utf-8").partition("## The loss study of experts")[2].partition("\n## ")[0]
    return block.strip() in section and "evidence/experts/runs.json" in section


def results():
    """Figures of docs/results.md: the values that the evidence gives."""
    experts, trained = read("experts/runs.json")["runs"], largest_trained()
    first_runs = {arm["name"]: arm["gaps"]["0"] for arm in read("parity/l.json")["arms"] if arm["gaps"]}
    texts = [grid(size, arm) for arm in ("nvfp4_mlp", "mxfp4_all_linear", "fp8_all_linear") for size in "sml"]
    texts += [grid("m"), size_of_grid("m"), tokens_per_parameter("m"), signed(first_runs["nvfp4_mlp"])]
    texts += [signed(grid_gap("s", "bf16-twin")["interval"]["mean"]), grid_bracket("bf16-twin")]
    for arm, cell in (("quartet2", "3M@16"), ("nvfp4", "3M@16"), ("nvfp4", "10M@5"), ("remainder_4over6", "10M@5")):
        texts += league(arm, cell)
    means = [interval(paired(read("league/runs.json")["10M@5"], arm))[0] for arm in ("remainder_4over6", "nvfp4")]
    texts += [f"{means[0] / means[1]:.2f}", millions(read("league/plan.json")["sizes"]["10M"]["parameters"])]

    runs = {arm: read(f"loss_{arm}.json")["runs"] for arm in ("bf16", "nvfp4")}
    losses = {arm: [run["validation"] for run in found] for arm, found in runs.items()}
    early = {arm: [np.mean(run["loss"][199:273]) for run in found] for arm, found in runs.items()}
    for nats in (interval(np.subtract(of["nvfp4"], of["bf16"])) for of in (losses, early)):
        texts += [f"{nats[0]:+.3f} nats", f"[{nats[1]:.3f}, {nats[2]:.3f}]"]
    percent = interval(100 * (np.divide(losses["nvfp4"], losses["bf16"]) - 1))
    texts += [signed(percent[0]), bracket(*percent[1:]), millions(runs["nvfp4"][0]["tokens"][-1])]
    texts += [millions(count_params(trained) - 2 * trained.vocab_size * trained.embed)]
    texts += re.findall(r"seen ([\d.]+) times", runs["nvfp4"][0]["data"])
    (gaps,) = (point["values"] for point in read("playbook/playbook.json")["points"] if "gap to" in point["what"])
    texts += [signed(float(gap)) for gap in gaps.values()]

    plan = read("experts/plan.json")
    texts += [millions(plan["parameters"]), millions(plan["steps"] * plan["batch"] * plan["seq"])]
    texts += [f"{run['validation_loss']:.4f}" for name, run in experts.items() if "twin" not in name]
    mean, low, high = interval(paired(experts, "nvfp4"))
    texts += [*map(signed, paired(experts, "nvfp4")), signed(mean), bracket(low, high)]
    texts += map(signed, paired(experts, "bf16-twin"))

    texts += [min(speeds("frontier_1b_h200.json")), max(speeds("frontier_8b16_h200.json"))]
    texts += speeds("step_1b_h200.json", "fp8") + speeds("step_8b_whole_h200.json", "fp8")
    calls = rows_of(read("experts/step_without_loop_h200.json"))
    times = {row["recipe"]: row["milliseconds"] for rows in calls for row in rows}  # fp8: the next call on the card
    texts += [f"{times['bf16'] / times[recipe]:.3f}x" for recipe in ("nvfp4", "fp8")]
    texts += [speeds("in_place_h200.json", recipe, 3)[1] for recipe in ("nvfp4", "fp8")]
    texts.append(max(speeds("steps_one_pipeline_h200.json", digits=3)))
    texts.append(f"{read('by_hand_h200.json')['llama-60m']['ratio']}x")
    for name in ("mesh_fsdp8_mlp", "mesh_fsdp8_all_linear", "mesh_fsdp4_tensor2"):
        texts += speeds(f"{name}_h200.json", digits=3) + speeds(f"{name}_h200.json", "fp8", 3)
    return set(texts)


# Of the grid, in its plan; of the playbook, in its page: tokens and parameters with embeddings.
SIZES_OF_RUNS = {"53M", "20.5M", "328M"}
ROUNDER_ON_THE_README = {"0.93x", "0.78x", "1.34x"}


def test_results_page_has_the_values_of_its_evidence():
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    shown = {figure for block in blocks(page) for figure in figures(block)} - CONVENTIONS - SIZES_OF_RUNS
    assert shown == results() | {value for value, _ in computed().values()} - ROUNDER_ON_THE_README
    for size in SIZES_OF_RUNS - {"53M"}:
        assert size in (EVIDENCE / "playbook" / "README.md").read_text(encoding="utf-8")


def test_league_page_has_the_gaps_of_its_runs():
    """Its table of 41 arms, of which two are twins, two more cells, the intervals, and who joined the plan when."""
    page = (ROOT / "docs" / "league.md").read_text(encoding="utf-8").partition("## What came out")[2]
    tables = page.split("| arm | gap of each seed | code | prose |")[1:]
    for cell, text in zip(("3M@16", "10M@5", "1M@50"), tables, strict=True):
        runs = read("league/runs.json")[cell]
        rows = re.findall(r"^\| `(\S+)` \| ([+-][^|]+) \| [+-]", text.partition("\n\n")[0], re.M)
        assert rows == [(arm, ", ".join(map(signed, paired(runs, arm)))) for arm, _ in rows]
        if cell == "3M@16":
            twins = [arm for arm, _ in rows if arm.endswith("-twin")]
            assert (len(rows), len(twins)) == (41, 2) and "41 arms: 39 candidates and two twins" in page
    for arm in ("nvfp4", "quartet2", "nvfp4_remainder", "remainder_4over6", "remainder_late"):
        mean, found = map(re.escape, league(arm))
        assert re.search(rf"^\| `{arm}`.*\| \**{mean}\** {found} \|", page, re.M), (arm, mean, found)
    joined = page.partition("**Which arms")[2].partition("Each arm entered")[0]
    counts = re.findall(r"^\| (\d+)(?: of| published|:)", joined, re.M)
    planned = read("league/plan.json")["arms"]
    assert sum(map(int, counts)) == 39 and len(planned) == 39 + 2 + 1 + 3  # bf16, and three of the ablation alone


def test_gemm_times_of_recipe_halfbyte_are_those_of_devices():
    """Shares of bf16's time on the page of the recipe: four or three GEMMs of three, by peak and by fitted rates."""
    from halfbyte.devices import device_by_name
    from halfbyte.plan.rate_calibration import FITTED_RATES

    page = (ROOT / "docs" / "halfbyte-recipe.md").read_text(encoding="utf-8")
    cells = [tuple(map(float, row)) for row in re.findall(r"\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.M)]
    rates = [device_by_name("gb300").peak]
    rates += [FITTED_RATES.rates(device_by_name(name)).gemm for name in ("gb300", "gb200")]
    for (four, three, fp8), rate in zip(cells, rates, strict=True):
        fp4 = rate.get("fp4") or rate["nvfp4"]
        wanted = (4 / 3 * rate["bf16"] / fp4, rate["bf16"] / fp4, rate["bf16"] / rate["fp8"])
        assert (four, three, fp8) == pytest.approx(wanted, abs=0.006)


def test_page_is_short_and_its_picture_exists():
    assert len(PAGE.splitlines()) <= 130
    assert (ROOT / re.search(r"^!\[[^\]]+\]\((\S+)\)", PAGE, re.M)[1]).exists()


def fence(language, number=0):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.S | re.M)[number]


def test_python_block_has_eight_lines():
    assert len([line for line in fence("python").splitlines() if line.strip()]) == 8


@pytest.mark.slow
def test_python_block_prints_the_output_below_it(quick_code):
    """The report goes to stderr and the losses to stdout; losses within 3%, as sums differ between processors."""
    out, err = io.StringIO(), io.StringIO()
    promotion = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")  # a reader's defaults
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), promotion[0], promotion[1]:
        exec(compile(fence("python"), "README.md", "exec"), {"__name__": "example"})
    *report, losses = fence("text").splitlines()
    assert err.getvalue().splitlines()[-len(report) :] == report
    number = r"\d+\.\d+"
    assert re.sub(number, "N", out.getvalue().strip()) == re.sub(number, "N", losses)
    shown, printed = (list(map(float, re.findall(number, text))) for text in (losses, out.getvalue()))
    assert printed == pytest.approx(shown, rel=0.03)


def form(line):
    """A line without its numbers, its spaces, and what the README has cut off behind `...`."""
    return "".join(re.sub(r"[\d,.]+(e[+-]\d+)?", "N", line.removesuffix("...")).split())


@pytest.mark.slow
@pytest.mark.parametrize("number, words", [(1, f"train demo {SMALL} --run-dir run"), (2, "doctor")])
def test_output_of_a_command_has_the_form_of_the_page(
    number, words, tmp_path, monkeypatch, capfd, one_device, quick_compiles
):
    """Line by line, numbers aside: `make train` is the demo, here two steps of one layer of it."""
    from halfbyte.cli import main as cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    assert cli.main(words.split()) == 0
    captured = capfd.readouterr()
    shown = [form(line).replace("worse", "better") for line in (captured.out + captured.err).splitlines()]
    wanted = [form(line).replace("worse", "better") for line in fence("text", number).splitlines()]
    assert [line for line in wanted if not any(other.startswith(line) for other in shown)] == []
