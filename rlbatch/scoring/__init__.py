"""Trainer logprobs of a `Batch` from a transformers model.

`trainer_logprobs` does it all; `logprob_head` is for a training loop that calls the model itself, and
`model_inputs` for one that wants logits. Each is right only in the form proven here: transformers attends
across packed sequences when it is called in the obvious way, and many models change logits after the head.
"""

from rlbatch.scoring.identity import model_identity
from rlbatch.scoring.inputs import ModelInputs, model_inputs
from rlbatch.scoring.isolation import require_packing_isolated
from rlbatch.scoring.kept import kept_sets
from rlbatch.scoring.logprobs import logprob_head, trainer_logprobs
from rlbatch.scoring.model import load_model, model_vocab_size
from rlbatch.scoring.suspects import logits_for
from rlbatch.scoring.tokenizer import prepended_bos, tokenizer_fingerprint

__all__ = [
    "ModelInputs",
    "kept_sets",
    "load_model",
    "logits_for",
    "logprob_head",
    "model_identity",
    "model_inputs",
    "model_vocab_size",
    "prepended_bos",
    "require_packing_isolated",
    "tokenizer_fingerprint",
    "trainer_logprobs",
]
