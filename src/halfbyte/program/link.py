"""How much of a step's communication computation hides, if collectives share one link.

`hidden_share` asks of each collective alone whether enough runs beside it. Where several are under way at once, the
same GEMM is counted for each of them; here it is not: collectives under way divide the link evenly, a GEMM lets them go
on for as long as it lasts at peak, and whoever waits for one lets the others go on as well.
"""

import math
from collections.abc import Iterable, Mapping

from .attention import attention_of
from .collectives import Overlap, under
from .gemms import gemms_of
from .text import Instruction, Program


def hidden_on_one_link(
    program: Program, found: Iterable[Overlap], *, flops_per_second: Mapping[str, float], link: float
) -> float:
    """Part of the time of these collectives, `link` in bytes a second, that GEMMs and fused attention last at peak. 1.0
    where nothing travels.
    """
    by_place: dict[str, list[Overlap]] = {}
    for each in found:
        by_place.setdefault(each.collective.instruction.computation, []).append(each)
    total = exposed = 0.0
    for place, here in by_place.items():
        times = here[0].collective.times
        seconds = {each.collective.instruction.name: each.collective.wire_each / link for each in here}
        waits = {each.collective.instruction.name for each in here if not each.collective.asynchronous}
        total += times * sum(seconds.values())
        exposed += times * _waited(program, program.computations[place], seconds, waits, flops_per_second)
    return 1 - exposed / total if total else 1.0


def _waited(
    program: Program,
    body: list[Instruction],
    seconds: Mapping[str, float],
    synchronous: set[str],
    rates: Mapping[str, float],
) -> float:
    """Seconds that one run of `body` stands still for its collectives."""
    waited, under_way = 0.0, dict[str, float]()
    for found in body:
        ends = found.opcode.endswith("-done")
        done = next((name for name in found.operands if name in under_way), "") if ends else ""
        if found.name in seconds:
            under_way[found.name] = seconds[found.name]
            done = found.name if found.name in synchronous else ""
        if done:
            waited += _go_on(under_way, math.inf, until=done)
        elif under_way:
            _go_on(under_way, _lasts(program, found, rates))
    return waited


def _go_on(under_way: dict[str, float], seconds: float, *, until: str = "") -> float:
    """Lets collectives divide the link for `seconds`, or until one has arrived, which is taken out; the seconds that
    this took.
    """
    spent = 0.0
    while spent < seconds and under_way.get(until, 1.0) > 0 and any(left > 0 for left in under_way.values()):
        going = [name for name, left in under_way.items() if left > 0]
        each = min(min(under_way[name] for name in going), (seconds - spent) / len(going))
        under_way |= {name: under_way[name] - each for name in going}
        spent += each * len(going)
    under_way.pop(until, None)
    return spent


def _lasts(program: Program, found: Instruction, rates: Mapping[str, float]) -> float:
    launched = list(under(program, found, 1))
    products = (
        gemm.flops / rates.get(gemm.format, rates["bf16"]) for each in launched for gemm in gemms_of(program, each)
    )
    fused = (call.flops / rates["bf16"] for each in launched for call in attention_of(program, each))
    return sum(products) + sum(fused)
