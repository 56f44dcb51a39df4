"""`Scores`: what the trainer's model says of a sample, computed once; with noise where that is asked for."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rlbatch.collate import collate
from rlbatch.drill.noise import MAX_POSITIONS, Noise, draw, scale_for
from rlbatch.faults import Scored
from rlbatch.records import Sample
from rlbatch.scoring import model_inputs
from rlbatch_kernels import token_logprobs

MAX_LOGIT_BYTES = 1 << 30
"""Logits that are kept, a gigabyte of them; what was dropped is computed again when it is needed."""
CALIBRATION_SAMPLES = 64


class Scores:
    """Scores samples alone with one model; made once a drill.

    Attributes:
        vocab_size: ids that the model can read and predict.
    """

    def __init__(
        self, model: nn.Module, *, vocab_size: int, noise: Noise, calibrate_on: Sequence[Sample]
    ) -> None:
        """Find the scale of the noise, where there is any.

        Args:
            model: of `rlbatch.scoring.load_model`.
            vocab_size: its `model_vocab_size`.
            noise: what is added to its logits.
            calibrate_on: samples on which the noise has its KLD, at least one where it has any.

        Raises:
            RecordError: the noise cannot be had on these samples.
            ScoringError: the model cannot score.
        """
        self.vocab_size: int | None = vocab_size
        self._model = model
        self._device = next(model.parameters()).device
        self._tails = noise.tails
        self._scale = 0.0
        self._kept: OrderedDict[bytes, Scored] = OrderedDict()
        self._num_bytes = 0
        if noise.kld:
            self._scale = self._scale_of(noise, calibrate_on[:CALIBRATION_SAMPLES])

    def __call__(self, sample: Sample) -> Scored:
        """The sample with its trainer logprobs and logits; the same object for the same sample while kept."""
        key = sample.token_ids.tobytes() + sample.temperature.tobytes() + (sample.turn >= 0).tobytes()
        known = self._kept.get(key)
        if known is None:
            known = self._keep(key, self._score(sample))
        self._kept.move_to_end(key)
        return known if known.sample is sample else replace(known, sample=sample)

    def _keep(self, key: bytes, scored: Scored) -> Scored:
        self._kept[key] = scored
        self._num_bytes += scored.logits.nbytes
        while self._num_bytes > MAX_LOGIT_BYTES and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._num_bytes -= dropped.logits.nbytes
        return scored

    def _score(self, sample: Sample) -> Scored:
        logits = self._logits(sample)
        if self._scale:
            logits += self._scale * draw(sample, logits.shape, self._tails)
        sampled = torch.from_numpy((sample.turn >= 0)[1:])
        logprobs = np.full(len(sample), np.nan)
        values = token_logprobs(
            torch.from_numpy(logits[:-1]),
            torch.from_numpy(sample.token_ids[1:].astype(np.int64)),
            temperature=torch.from_numpy(sample.temperature[1:].copy()),
            mask=sampled,
        )
        logprobs[1:][sampled.numpy()] = values[sampled].double().numpy()
        return Scored(sample=sample, trainer_logprobs=logprobs, logits=logits)

    def _logits(self, sample: Sample) -> NDArray[np.float32]:
        """[T, V], as the model gives them."""
        batch = collate([sample], layout="padded", purpose="audit").to(self._device)
        with torch.no_grad():
            answer: Any = self._model(**model_inputs(batch))
        logits: NDArray[np.float32] = answer.logits[0].float().cpu().numpy()
        return logits

    def _scale_of(self, noise: Noise, samples: Sequence[Sample]) -> float:
        rows, units = [], []
        num_sampled = sum(int(np.count_nonzero(sample.turn >= 0)) for sample in samples)
        every = -(-num_sampled // MAX_POSITIONS)
        for sample in samples:
            logits = self._logits(sample)
            at = np.flatnonzero(sample.turn >= 0)[::every]
            divisor = sample.temperature[at, None]
            rows.append(logits[at - 1] / divisor)
            units.append(draw(sample, logits.shape, noise.tails)[at - 1] / divisor)
        return scale_for(noise, rows, units)
