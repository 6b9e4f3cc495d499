"""The order of a step on several GPUs: XLA is told how long things take.

The step is compiled, read, and compiled again with the times of a roofline (`program.roofline`) as XLA's profile of an
earlier run. The times are kept in the user's cache, so that the next start compiles once. Whoever gives XLA a profile
of their own, or lets JAX make one, keeps theirs; wherever XLA is left to its own guess on several GPUs, that is said.
"""

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from halfbyte.devices import Device, lookup
from halfbyte.devices.table import NETWORK
from halfbyte.inputs import replace_file, user_cache
from halfbyte.inputs.kept import is_kept, kept
from halfbyte.program import Roofline, Unreadable, as_profile, costs, read

PROFILE = "xla_gpu_pgle_profile_file_or_directory_path"
# Parts of the peaks in the device table: what GEMMs, attention forward and backward, passes and links were seen to
# reach. Only their relations decide an order.
GEMMS, ATTENTION, MEMORY, LINKS = 0.72, (0.6, 0.45), 0.75, 0.78


def _alone(topic: str, value: Any) -> dict[int, Any]:
    return {0: value}


def _aloud(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Scheduling:
    """Where a step runs, who orders it (`by` roofline or xla), how ranks agree (`ranks.Group.share`), who is told."""

    mesh: Mesh
    by: str = "roofline"
    share: Callable[[str, Any], dict[int, Any]] = _alone
    say: Callable[[str], None] = _aloud
    options: Mapping[str, Any] | None = None
    """Of XLA, beside the step's own."""

    def compile(self, lowered: Any) -> Any:
        """The lowered step, compiled in the order of the roofline where it has several GPUs."""
        first = self.mesh.devices.flat[0]
        if self.by == "xla" or self.mesh.size == 1 or first.platform not in ("gpu", "cuda"):
            return lowered.compile()
        device = lookup(first)
        why = _left_to_xla(device)
        found = None if why else self._times(lowered, device)
        if not found:
            self.say(f"NOTE: XLA orders this step by its own guess of times: {why or 'the program cannot be read'}")
            return lowered.compile()
        return lowered.compile(compiler_options={PROFILE: str(_written(as_profile(found)))})

    def _times(self, lowered: Any, device: Device) -> dict[str, float] | None:
        """Microseconds by name as the first rank has them, from an earlier start or from a compilation, in which all
        ranks take part.
        """
        text = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        facts = {"step": text, "mesh": dict(self.mesh.shape), "device": device.name, "options": self.options}

        def make() -> dict[str, float] | None:
            self.say("compiling the step to see how long things take; then again, ordered by that")
            try:
                return costs(read(lowered.compile().as_text()), dict(self.mesh.shape), roofline(device))
            except Unreadable as error:
                self.say(f"NOTE: {error}")
                return None

        main = jax.process_index() == 0
        known = self.share("known", main and is_kept("schedule", facts))[0]
        mine = kept("schedule", facts, make, say=self.say) if main else None if known else make()
        found: dict[str, float] | None = self.share("times", mine if main else None)[0]
        return found


def roofline(device: Device) -> Roofline:
    """What a device of the table reaches."""
    assert device.bandwidth and device.nvlink_bandwidth and device.nvlink_domain
    bf16 = device.peak["bf16"]
    return Roofline(
        gemm={name: GEMMS * peak for name, peak in device.gemm_peaks.items()},
        attention=(ATTENTION[0] * bf16, ATTENTION[1] * bf16),
        memory=MEMORY * device.bandwidth,
        link=LINKS * device.nvlink_bandwidth / 2,
        network=LINKS * NETWORK[device.name],
        domain=device.nvlink_domain,
    )


def _left_to_xla(device: Device) -> str:
    """Why XLA has no roofline here; "" if it may."""
    if device.name not in NETWORK:
        return f"the table knows no links of {device.name}"
    made_by_jax: bool = getattr(jax.config, "jax_enable_pgle")  # noqa: B009  typed in some JAX versions only
    if PROFILE in os.environ.get("XLA_FLAGS", "") or made_by_jax:
        return "you gave it a profile, or let JAX make one"
    return ""


def _written(profile: str) -> Path:
    """The profile as a file of the user's cache, named by what it holds: JAX's compile cache knows it by its path."""
    name = f"{hashlib.sha256(profile.encode()).hexdigest()[:32]}.pbtxt"
    try:
        path = user_cache() / "schedule" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, profile)
    except OSError:
        path = Path(tempfile.mkdtemp(prefix="halfbyte-")) / name
        replace_file(path, profile)
    return path
