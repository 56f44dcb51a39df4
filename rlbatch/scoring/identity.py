"""`model_identity`: what a model's directory says of the rollouts that it sampled."""

import os
from typing import Any

from torch import nn

from rlbatch.scoring.model import model_vocab_size
from rlbatch.scoring.tokenizer import prepended_bos, tokenizer_fingerprint
from rlbatch.storage.statements import ModelIdentity


def model_identity(path: str | os.PathLike[str], model: nn.Module) -> ModelIdentity:
    """Its tokenizer, vocabulary, BOS and EOS.

    Args:
        path: the directory.
        model: that `load_model` made of it.
    """
    generation: Any = model.generation_config
    end = None if generation is None else generation.eos_token_id
    ids = [] if end is None else end if isinstance(end, list) else [end]
    return ModelIdentity(
        tokenizer_fingerprint=tokenizer_fingerprint(path),
        vocab_size=model_vocab_size(model),
        eos_token_ids=tuple(int(token_id) for token_id in ids),
        bos_token_id=None if generation is None else prepended_bos(path, generation.bos_token_id),
    )
