"""The shortest list of layers or sites to keep in higher precision for a wanted signal-to-noise ratio, as a policy.

A linear that falls short is named by the widest rule that names no linear that does not: a whole kind
(`mlp/down=bf16`), a run of whole layers (`layers[6:8]=bf16`), or a kind in a run of layers
(`layers[2:4]/mlp/down=bf16`). The rules follow the run's own policy, and the last that matches decides.
"""

from collections.abc import Iterator, Mapping, Set

Site = tuple[int, str]


def recommend(snr: Mapping[Site, float], quantized: Set[Site], *, wanted: float, policy: str) -> str:
    """A `--policy` value; the run's own if every linear reaches `wanted` decibels. `snr`: (layer, "mlp/down") -> dB of
    all linears, of which `quantized` are."""
    short = {site for site in quantized if not snr[site] >= wanted}
    if short and short == set(quantized):
        return "*=bf16"
    return "; ".join([policy, *(f"{rule}=bf16" for rule in cover(short, set(snr), free=set(snr) - set(quantized)))])


def cover(short: Set[Site], everything: Set[Site], free: Set[Site] = frozenset()) -> list[str]:
    """Rules that name every site of `short`, and of the others only those in `free`; the rule that names most first."""
    left, rules = set(short), []
    fits = {rule: sites & short for rule, sites in _offers(everything) if sites <= short | free}
    while left:
        best = max(fits, key=lambda rule: (len(fits[rule] & left), -len(rule)))
        rules.append(best)
        left -= fits[best]
    return rules


def _offers(everything: Set[Site]) -> Iterator[tuple[str, set[Site]]]:
    """Every rule that could be written, and what it names."""
    layers = sorted({layer for layer, _ in everything})
    kinds = sorted({kind for _, kind in everything})
    groups = sorted({kind.split("/")[0] for kind in kinds})
    globs = {
        **{kind: {kind} for kind in kinds},
        **{f"{g}/*": {k for k in kinds if k.startswith(f"{g}/")} for g in groups},
    }
    for first in layers:
        for last in layers[layers.index(first) :]:
            span = f"layers[{first}]" if first == last else f"layers[{first}:{last + 1}]"
            inside = {site for site in everything if first <= site[0] <= last}
            yield span, inside
            for glob, named in globs.items():
                yield f"{span}/{glob}", {site for site in inside if site[1] in named}
    for glob, named in globs.items():
        yield glob, {site for site in everything if site[1] in named}
