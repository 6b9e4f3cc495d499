"""lm-evaluation-harness with our models in it (extra `harness`).

    python -m halfbyte.hf.lm_eval_harness --model halfbyte --model_args run=RUN --tasks lambada_openai,blimp

is the harness's own command with one model more: `halfbyte`, a run or a Hugging Face folder. Texts are encoded and
scored as `halfbyte eval` does it: a document begins with bos, context and continuation are encoded together.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from halfbyte.evaluation import GENERATION_RULES, SCORING_RULES, LanguageModel, Scorer, TextGenerator
from halfbyte.evaluation.eval_tasks import text_requests, tokenize_pair
from halfbyte.hf.model_loading import open_model


@register_model("halfbyte")
class HalfbyteLM(LM):
    """A run or a folder as the harness asks it: log-likelihoods of continuations and of texts, and greedy text."""

    def __init__(
        self, run: str, recipe: str = "", compute_dtype: str = "", seq: int = 0, batch_tokens: int = 8192,
        mesh: str = "", **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        opened = open_model(run, recipe_name=recipe, mesh=mesh, rules=SCORING_RULES, compute_dtype=compute_dtype)
        self.model: LanguageModel = opened.model
        self.scorer = Scorer(self.model, window=int(seq) or None, batch_tokens=int(batch_tokens))
        self._generator: TextGenerator | None = None

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood of the continuation, whether greedy decoding gives it) for each (context, continuation)."""
        asked = [tokenize_pair(self.model.tokenizer, *request.args) for request in requests]
        return [(-score.nll, score.greedy) for score in self.scorer.score(asked)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text, in windows."""
        window = self.scorer.window
        asked = [text_requests(self.model.tokenizer, request.args[0], window, window) for request in requests]
        found = iter(self.scorer.score([part for parts in asked for part in parts]))
        return [-sum(next(found).nll for _ in parts) for parts in asked]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy text after each context, up to the first of its stop strings."""
        return [self._write(*request.args) for request in requests]

    def _write(self, context: str, settings: dict[str, Any]) -> str:
        if settings.get("do_sample") or settings.get("temperature", 0.0):
            raise ValueError(f"the harness asks for sampling ({settings}); this adapter writes greedily")
        writing = dataclasses.replace(self.model.context, rules=GENERATION_RULES)
        self._generator = self._generator or TextGenerator(dataclasses.replace(self.model, context=writing))
        longest = self.model.config.max_seq - int(settings.get("max_gen_toks", 256))
        ids = self.model.tokenizer.encode(context, bos=True)[-max(1, longest) :]
        room = min(int(settings.get("max_gen_toks", 256)), self.model.config.max_seq - len(ids))
        made = list(self._generator.tokens(ids, max_tokens=room))
        return truncate_at_stop(self.model.tokenizer.decode(made), settings.get("until") or ())


def truncate_at_stop(text: str, stops: str | Sequence[str]) -> str:
    """`text` up to the first of the stop strings."""
    for stop in [stops] if isinstance(stops, str) else stops:
        text = text.split(stop)[0] if stop else text
    return text


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
