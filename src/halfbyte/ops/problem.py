"""The question a backend is asked before anything is traced: can you serve this linear, on that device?"""

import contextlib
import dataclasses

import jax

from halfbyte.devices import Device, lookup
from halfbyte.recipe import GEMMS, Recipe

_target = jax.make_user_context(None)  # JAX traces a function anew where it differs


def compile_for(device: Device) -> contextlib.AbstractContextManager[None]:
    """Backends are chosen for `device` instead of this machine's: for programs compiled here and run elsewhere."""
    context: contextlib.AbstractContextManager[None] = _target(device)
    return context


def target() -> Device:
    """The device that programs traced now are meant for."""
    chosen: Device | None = _target.value
    return chosen or lookup(jax.devices()[0])


@dataclasses.dataclass(frozen=True)
class Problem:
    """y = x W with x [tokens, inputs], W [inputs, outputs].

    `training` asks for all three GEMMs, otherwise for fprop alone.
    """

    recipe: Recipe
    tokens: int
    inputs: int
    outputs: int
    device: Device
    training: bool = True
    dtype: str = "bfloat16"  # of the activations
    sharded: bool = False  # over more than one device

    def without_kernels(self) -> str | None:
        """Why GPU kernels of our own cannot serve it whatever its recipe, or None."""
        if self.device.capability is None:
            return f"its kernels are for NVIDIA GPUs, this is {self.device.name}"
        if self.sharded:
            return "its kernels read a whole array on one device, and this program is sharded"
        return None if self.dtype == "bfloat16" else f"its kernels read bfloat16 activations, got {self.dtype}"

    def contractions(self) -> dict[str, int]:
        """GEMM -> length of the axis it sums over."""
        sizes = {"fprop": self.inputs, "dgrad": self.outputs, "wgrad": self.tokens}
        return sizes if self.training else {"fprop": self.inputs}

    def unblockable(self) -> str | None:
        """Why the recipe's formats cannot cut this problem into blocks, or None."""
        for gemm, size in self.contractions().items():
            for role in GEMMS[gemm]:
                policy = getattr(self.recipe, role)
                block = 16 if policy.hadamard else 1
                block = max(block, policy.format.block or 1)
                if size % block:
                    over = {"fprop": "inputs", "dgrad": "outputs", "wgrad": "tokens"}[gemm]
                    return (
                        f"{gemm} sums over {size} {over}, and {role} ({policy}) needs a multiple of {block}; "
                        f"pad the {over}, or give this linear the bf16 recipe in the layer policy"
                    )
        return None
