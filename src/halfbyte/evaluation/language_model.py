"""A trained model as evaluation sees it: weights, tokenizer, and the precision its forward pass runs in."""

from dataclasses import dataclass

from halfbyte.data import Tokenizer
from halfbyte.models import Context, LlamaConfig, Params
from halfbyte.sharding import DEFAULT_RULES

# On a mesh, weights rest as in training. Scored rows are split over data and fsdp, never along positions, whose number
# is not the mesh's to choose; a text that is written is one row, on all devices.
SCORING_RULES = DEFAULT_RULES.replace(seq=(), residual_seq=())
WRITING_RULES = SCORING_RULES.replace(batch=())


@dataclass(frozen=True)
class LanguageModel:
    """What is generated from and scored. `seq` is the length it was trained on: the default window of scoring.

    Under a quantized recipe the scale of a tensor comes from all of its tokens, padding included, so a score moves in
    its last digits with the shape of the batch; under bf16 it does not.
    """

    config: LlamaConfig
    params: Params
    tokenizer: Tokenizer
    context: Context
    seq: int

    def __post_init__(self) -> None:
        if self.tokenizer.vocab_size > self.config.vocab_size:
            raise ValueError(
                f"the tokenizer has {self.tokenizer.vocab_size} ids, but model {self.config.name} knows only "
                f"{self.config.vocab_size}; use the tokenizer that the model was trained with"
            )
