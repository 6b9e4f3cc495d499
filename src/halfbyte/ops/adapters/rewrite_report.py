"""Report of a rewrite: one entry per dot product of the function, with its recipe or why it was not replaced."""

from __future__ import annotations

import sys
from dataclasses import dataclass

_SHOWN: set[str] = set()


@dataclass(frozen=True)
class DotReport:
    """One dot product: the path of its weight, and its recipe or the reason why it was not replaced.

    `layers`: the layers it runs for, None if unknown. `num_executions`: how often it runs (the product of the lengths
    of the scans around it). `forward_only`: why it has no gradient at this number of tokens, empty if it has one.
    `shares_x`: the other dots that read the same x, which is quantized once for all of them. `swiglu_of`: gate and up,
    if this dot's quantize passes compute silu(gate) * up, with the roundings of `halfbyte.mlp`.
    """

    path: str | None
    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    recipe: str | None = None
    skip_reason: str = ""
    layers: range | None = None
    num_executions: int = 1
    forward_only: str = ""
    shares_x: tuple[str, ...] = ()
    swiglu_of: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = self.path or "(no weight)"
        if self.layers is not None and len(self.layers):
            where += f" layers {self.layers[0]}..{self.layers[-1]}"
        times = f" x{self.num_executions}" if self.num_executions > 1 else ""
        what = f"-> {self.recipe}" if self.recipe else f"left: {self.skip_reason}"
        what += f", forward only: {self.forward_only}" if self.forward_only else ""
        what += f", x made once with {', '.join(self.shares_x)}" if self.shares_x else ""
        what += f", silu({self.swiglu_of[0]}) * {self.swiglu_of[1]} inside its passes" if self.swiglu_of else ""
        return f"{where}  {list(self.lhs)} x {list(self.rhs)}{times}  {what}"


@dataclass(frozen=True)
class RewriteReport:
    """Every dot product, ragged dot and convolution of a rewritten function, in program order."""

    sites: tuple[DotReport, ...]

    @property
    def replaced(self) -> tuple[DotReport, ...]:
        """Returns the dots that run in a recipe."""
        return tuple(site for site in self.sites if site.recipe)

    @property
    def skipped(self) -> tuple[DotReport, ...]:
        """Returns the dots that were not replaced."""
        return tuple(site for site in self.sites if not site.recipe)

    def __str__(self) -> str:
        head = f"apply_recipe: {len(self.replaced)} dots replaced, {len(self.skipped)} left"
        return "\n".join([head, *(f"  {site}" for site in self.replaced + self.skipped)])


def mark_shown(report: RewriteReport) -> None:
    """Keeps `show_once` from printing this report."""
    _SHOWN.add(str(report))


def show_once(report: RewriteReport) -> None:
    """Prints the report on stderr, unless the same one was printed before in this process."""
    text = str(report)
    if text not in _SHOWN:
        _SHOWN.add(text)
        print(text, file=sys.stderr)
