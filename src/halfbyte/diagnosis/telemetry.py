"""Telemetry of a run: every N steps, what its operands are like and how noisy its GEMMs are, one line in
telemetry.jsonl.

The same numbers as `halfbyte inspect`, on a part of the step's own batch; of experts, those of the fullest.
"""

import dataclasses
import time
from pathlib import Path

import jax

from halfbyte.recipe import Resolved
from halfbyte.train.observing import Moment

from .inspection import summarise
from .radar import Recorder, looking_context, part_of, quantized_gemms, step_of
from .replay import Replay
from .tensors import own_numbers

FILE = "telemetry.jsonl"
MOST_TOKENS = 512


class Telemetry(Recorder):
    """Writes telemetry.jsonl."""

    def __init__(self, every: int, directory: Path):
        super().__init__(every, directory / FILE)
        self._replays: dict[Resolved, Replay] = {}
        self.seconds = 0.0  # that it has taken

    def observe(self, moment: Moment) -> list[str]:
        """Write a line; say nothing, or why there is none."""
        if not quantized_gemms(moment.resolved):
            return []
        began = time.perf_counter()
        replay = self._replays.get(moment.resolved)
        if replay is None:
            context = looking_context(moment.config, moment.resolved, moment.mesh)
            replay = self._replays[moment.resolved] = Replay(moment.config.model, context)
        batch = part_of(moment.batch, MOST_TOKENS) if moment.mesh.size == 1 else moment.batch
        key = step_of(moment.config.rounding_seed, moment.step - 1)
        try:
            operands = [
                summarise(layer, given.site, role, [numbers])
                for layer, linears in replay.layers(moment.params, batch, key)
                for given in linears
                if given.recipe.quantized
                for role, numbers in jax.device_get(own_numbers(dataclasses.replace(given.fullest(), site=""))).items()
            ]
        except ValueError as reason:  # a recipe of which more than its GEMMs would have to be replayed
            return [f"telemetry before step {moment.step}: NOT SEEN, {reason}"]
        self._write({"step": moment.step, "operands": operands})
        self.seconds += time.perf_counter() - began
        return []
