"""A trained model as evaluation sees it: weights, tokenizer, and the precision its forward pass runs in."""

from dataclasses import dataclass
from typing import Any

from halfbyte.data import Tokenizer
from halfbyte.models import Context, LlamaConfig, Params


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

    def with_params(self, params: Any) -> "LanguageModel":
        """The same model with other weights."""
        return LanguageModel(self.config, params, self.tokenizer, self.context, self.seq)
