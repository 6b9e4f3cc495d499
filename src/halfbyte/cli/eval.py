"""Score a trained run: validation loss, perplexity of text, and local tasks.

halfbyte eval RUN                                         the validation split of the data it was trained on
halfbyte eval RUN wikitext2_test.txt.xz                   nats a token, bits a byte, perplexity
halfbyte eval RUN arc_easy.jsonl.xz blimp.jsonl.xz        accuracy with standard errors

Task files are jsonl, told apart by their fields: multiple choice (query, choices, gold), schemas (context_options,
continuation, gold), last words (context, continuation), minimal pairs (sentence_good, sentence_bad), text. A directory
stands for every task in it. Results are added to RUN/evaluations.jsonl."""

import datetime
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from halfbyte.cli.console import CommandResult, console, print_line, print_note, progress, rich_table
from halfbyte.io import check_int

if TYPE_CHECKING:
    from halfbyte import evaluation
    from halfbyte.hf.model_loading import LoadedModel

EVALUATIONS = "evaluations.jsonl"
TASK_METRICS = ("acc", "acc_norm", "ppl")
TEXT_METRICS = ("nats_per_token", "bits_per_byte", "ppl")


@dataclass(frozen=True)
class Args:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory, or a Hugging Face folder."""
    files: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[FILE ...]")] = ()
    """Tasks (.jsonl) and text (.txt), also .xz, .gz, .zst; directories, globs. None: the run's validation split."""
    limit: int = 0
    """Examples a task, spread evenly over it; for text and the validation split, windows from its beginning; 0: all."""
    seq: int = 0
    """Tokens that the model reads at once; 0: as many as it was trained on."""
    stride: int = 0
    """For text: tokens scored in each window; the rest of it is context. 0: all of them."""
    batch_tokens: int = 8192
    """Tokens of a batch."""
    scales: Literal["batch", "window"] = "batch"
    """What shares the scale of a quantized tensor: all windows of a batch (fast; scores move a little with
    --batch-tokens), or each window alone (one at a time; they do not)."""
    recipe: str = ""
    """Of the forward pass; empty: the recipe that the run trained with."""
    step: int | None = None
    """Checkpoint to use; without it, the newest."""
    mesh: str = ""
    """AXIS=SIZE,... over data, fsdp, tensor; empty: one device."""
    compute_dtype: Literal["", "bfloat16", "float32"] = ""
    """Of activations; empty: as the run trained, bfloat16 for a folder."""
    save: bool = True
    """Add the results to RUN/evaluations.jsonl (never to a folder's)."""
    unchecked: bool = False
    """Accept .zst and .xz files without a checksum, in which a flipped bit can pass as other text."""


def run(args: Args) -> CommandResult:
    from halfbyte.api import score_tasks
    from halfbyte.cli.main import to_jsonable
    from halfbyte.evaluation import SCORING_RULES, Scorer
    from halfbyte.hf.model_loading import open_model
    from halfbyte.train import append_row

    check_int("--limit", args.limit, zero="all examples")
    tasks = open_tasks(args.files, unchecked=args.unchecked)
    loaded = open_model(
        args.run, recipe_name=args.recipe, mesh=args.mesh, rules=SCORING_RULES, step=args.step,
        compute_dtype=args.compute_dtype,
    )  # fmt: skip
    save = args.save and loaded.config is not None
    scorer = Scorer(loaded.model, window=args.seq or None, batch_tokens=args.batch_tokens, scales=args.scales)
    print_line(loaded.describe())
    if loaded.model.context.policy is not None and args.scales == "batch":
        print(
            f"scales come from all tokens of a batch ({args.batch_tokens:,}): other batches, other last digits; "
            "--scales window scores each window alone"
        )
    found = []
    for result in score_tasks(loaded, scorer, tasks, limit=args.limit, stride=args.stride or None, progress=progress):
        found.append(result)
        if save:
            append_row(
                loaded.directory / EVALUATIONS, {**settings(args, loaded, scorer), **to_jsonable(asdict(result))}
            )
    print_table(found)
    if save:
        print_line(f"added to {loaded.directory / EVALUATIONS}")
    return CommandResult({**settings(args, loaded, scorer), "results": [asdict(result) for result in found]})


def open_tasks(arguments: tuple[str, ...], *, unchecked: bool = False) -> "list[evaluation.TaskFile]":
    """The task of every file; in a directory, files that hold no task are named and passed over."""
    from halfbyte.data.text_files import find_files
    from halfbyte.evaluation import UnknownTaskFormatError, open_task

    tasks = []
    for argument in arguments:
        for file in find_files([argument], unchecked=unchecked):
            try:
                tasks.append(open_task(file))
            except UnknownTaskFormatError as problem:
                if not Path(argument).is_dir():
                    raise
                print_note(f"passed over: {problem}")
    if arguments and not tasks:
        raise ValueError(f"no task in {', '.join(arguments)}")
    return tasks


def settings(args: Args, loaded: "LoadedModel", scorer: Any) -> dict[str, Any]:
    """What the numbers depend on beside the task."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    fixed = {"limit": args.limit, "seq": scorer.window, "stride": args.stride or scorer.window}
    fixed |= {"scales": scorer.scales, "batch_tokens": scorer.batch_tokens}
    return {"time": now, "run": str(loaded.directory), "step": loaded.step, "recipe": loaded.recipe, **fixed}


def print_table(results: "list[evaluation.TaskResult]") -> None:
    """One table of tasks, one of text."""
    text = [result for result in results if result.kind in ("text", "validation")]
    tasks = [result for result in results if result not in text]
    for heading, chosen, names in (("examples", tasks, TASK_METRICS), ("tokens", text, TEXT_METRICS)):
        shown = [name for name in names if any(name in result.metrics for result in chosen)]
        rows = [
            (r.task, f"{getattr(r, heading):,}", *(metric_cell(r, name) for name in shown), chance(r)) for r in chosen
        ]
        heads = ("task", heading, *(name.replace("_per_", "/") for name in shown), "chance" if chosen is tasks else "")
        if rows:
            console().print(rich_table(heads, rows))
    for result in results:
        if result.truncated:
            console().print(f"{result.task}: {result.truncated} of {result.examples} examples were cut to the window")


def chance(result: "evaluation.TaskResult") -> str:
    return "" if result.chance is None else f"{result.chance:.3f}"


def metric_cell(result: "evaluation.TaskResult", name: str) -> str:
    metric = result.metrics.get(name)
    return "" if metric is None else cell(metric.value, metric.error)


def cell(value: float, error: float | None) -> str:
    """value ± standard error."""
    form = ".4f" if value < 10 else ".2f" if value < 1e4 else ".2e"
    return f"{value:{form}}" + ("" if error is None else f" ± {error:{form}}")
