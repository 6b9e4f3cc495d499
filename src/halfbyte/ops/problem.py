"""The question a backend is asked before anything is traced: can you multiply this GEMM, on that device?"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from halfbyte.devices import Device, lookup, lowering_for
from halfbyte.kernels.architecture import explained_compile_errors
from halfbyte.ops.gemms import FPROP, GEMMS, Gemm
from halfbyte.recipe import Recipe

_target = jax.make_user_context(None)  # JAX traces a function anew where it differs


@contextlib.contextmanager
def compile_for(device: Device) -> Iterator[None]:
    """Chooses backends and lowers kernels for `device` instead of this machine's: for programs that are compiled here
    and run elsewhere. Raises RuntimeError if JAX cannot compile for a second GPU architecture in this process.
    """
    with _target(device), lowering_for(device), explained_compile_errors():
        yield


def target() -> Device:
    """The device that programs traced now are meant for."""
    chosen: Device | None = _target.value
    return chosen or lookup(jax.devices()[0])


def check_dtype(x: jax.Array, asked: str) -> None:
    """TypeError for an x that no linear multiplies; `asked` is the function that was called."""
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise TypeError(f"{asked} takes bfloat16 or float32, got x of {x.dtype}; convert with astype first")


def check_weight(w: Any, asked: str, name: str = "w") -> None:
    """TypeError for a weight that has no gradient to train it by, under the name it has there."""
    if not jnp.issubdtype(w.dtype, jnp.floating):
        raise TypeError(
            f"{asked} takes weights in floating point, float32 as a rule, got {name} of {w.dtype}; convert with astype "
            "first, and codes by their scales"
        )


@dataclasses.dataclass(frozen=True)
class Problem:
    """y = x W with x [tokens, inputs], W [inputs, outputs], as one device multiplies them.

    `training` asks for all three GEMMs, otherwise for fprop alone.
    """

    recipe: Recipe
    tokens: int
    inputs: int
    outputs: int
    device: Device
    training: bool = True
    dtype: str = "bfloat16"  # of the activations
    weight_dtype: str = "float32"  # of the master weight
    sharded: bool = False  # over more than one device, by the compiler
    parts: tuple[int, int] = (1, 1)  # of the inputs and outputs of the weight where it rests: gathered before a GEMM

    @property
    def gathered(self) -> bool:
        """Whether the weight is gathered before a GEMM reads it."""
        return self.parts != (1, 1)

    @property
    def weight_part(self) -> tuple[int, int]:
        """The shape of the weight where it rests."""
        return self.inputs // self.parts[0], self.outputs // self.parts[1]

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """The GEMMs asked for."""
        return GEMMS if self.training else (FPROP,)

    @property
    def quantized_gemms(self) -> tuple[Gemm, ...]:
        """Those with a quantized operand."""
        formats = {gemm: [getattr(self.recipe, role).format for role in gemm.roles] for gemm in self.gemms}
        return tuple(gemm for gemm in self.gemms if any(fmt.quantized for fmt in formats[gemm]))

    def contraction(self, gemm: Gemm) -> int:
        """How many products a sum of `gemm` has."""
        return int(getattr(self, gemm.over))

    @property
    def turned_wgrad(self) -> bool:
        """Whether wgrad computes dw^T = dy^T x: where the outputs alone of the weight are cut, so that a reduce-scatter
        cuts its result along the leading dim; along another one it would transpose all of it first.
        """
        return self.parts[0] == 1 < self.parts[1]

    def sizes(self, gemm: Gemm) -> tuple[int, int, int]:
        """(m, n, k): rows and columns of the result, and the contraction."""
        weight = (self.outputs, self.inputs) if self.turned_wgrad else (self.inputs, self.outputs)
        of = {"fprop": (self.tokens, self.outputs), "dgrad": (self.tokens, self.inputs)}
        return *of.get(gemm.name, weight), self.contraction(gemm)

    def without_kernels(self) -> str | None:
        """Why GPU kernels of our own cannot serve it whatever its recipe, or None."""
        if self.device.capability is None:
            return f"its kernels are for NVIDIA GPUs, this is {self.device.name}"
        if self.sharded:
            return "its kernels read a whole array on one device, and this program is sharded"
        return None if self.dtype == "bfloat16" else f"its kernels read bfloat16 activations, got {self.dtype}"

    def empty(self) -> str | None:
        """Why there is nothing to quantize, or None."""
        if 0 not in (self.tokens, self.inputs, self.outputs) or not self.recipe.quantized:
            return None
        sizes = f"x [{self.tokens}, {self.inputs}], W [{self.inputs}, {self.outputs}]"
        return f"{sizes} has nothing to quantize: leave the empty batch out, or give it the bf16 recipe"

    def unblockable(self) -> str | None:
        """Why the recipe's formats cannot cut this problem into blocks, or None. No tokens are any number of blocks."""
        for gemm in self.gemms:
            for role in gemm.roles:
                policy, size = getattr(self.recipe, role), self.contraction(gemm)
                if size % policy.run:
                    return (
                        f"{gemm} sums over {size} {gemm.over}, and {role} ({policy}) needs a multiple of {policy.run}; "
                        f"pad the {gemm.over}, or give this linear the bf16 recipe in the layer policy"
                    )
        return None
