"""Logits of suspects are those that the model gives in the batch, pictures and all."""

import types
from dataclasses import replace

import numpy as np
import pytest
import scoring_cases as cases
import torch
from torch import nn

from rlbatch.collate import Padding, collate
from rlbatch.records import MediaArray
from rlbatch.scoring import logits_for, model_inputs


class _Seeing(nn.Module):
    """Adds the mean of a picture to its placeholder (id 9); a hidden state is the sum of those so far."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.seen = []

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, *, pixel_values=None, attention_mask=None, use_cache):
        self.seen.append((input_ids.tolist(), None if pixel_values is None else pixel_values.tolist()))
        hidden = self.embedding(input_ids)
        if pixel_values is not None:
            places = input_ids == 9
            assert int(places.sum()) == len(pixel_values), "a picture for each placeholder"
            hidden = hidden.masked_scatter(
                places[..., None], pixel_values.mean(-1, keepdim=True).expand(-1, 8)
            )
        if attention_mask is not None:
            hidden = hidden * attention_mask[..., None]
        return types.SimpleNamespace(logits=self.head(hidden.cumsum(1)))


def _with_pictures(ids, pixels):
    sample = cases.make_sample(ids, num_prompt=2, name=f"s{ids[0]}")
    media = () if pixels is None else (MediaArray(name="pixel_values", values=np.float32(pixels)),)
    return replace(sample, media=media)


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_sequence_is_asked_about_with_its_own_pictures(side):
    # The third has a placeholder behind the first two tokens that are asked about: tool output, say.
    samples = [
        _with_pictures([1, 9, 9, 5, 7, 2], [[1, 2], [3, 4]]),
        _with_pictures([2, 3, 4], None),
        _with_pictures([3, 9, 6, 8, 9], [[7, 8], [-5, 6]]),
    ]
    batch = collate(samples, layout="padded", padding=Padding(side=side))
    model = _Seeing()
    with torch.no_grad():
        expected = model(**model_inputs(batch)).logits
    ask = logits_for(model)
    for index, segment in enumerate(batch.host_segments):
        model.seen.clear()
        start, stop = segment.start, segment.stop - 1
        found = ask(batch, index, start, stop)
        assert found.shape == (stop - start, 16)
        torch.testing.assert_close(found, expected[segment.row, start:stop], atol=1e-6, rtol=0)
        own = samples[segment.row]
        pixels = [part.values.tolist() for part in own.media]
        assert model.seen == [([own.token_ids.tolist()], pixels[0] if pixels else None)]


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_sequence_is_asked_about_alone(name, layout):
    model = cases.tiny_model(name)
    samples = cases.make_samples()
    batch = collate(samples, layout=layout)
    for index, segment in enumerate(batch.host_segments):
        start, stop = segment.start + 1, segment.stop - 1
        found = logits_for(model)(batch, index, start, stop)
        first, last = batch.tokens_of(segment)
        with torch.no_grad():
            alone = model(cases.token_ids(samples[index])[None]).logits[0]
        # Position t of a batch predicts token t + 1.
        torch.testing.assert_close(found, alone[first : last - 2], atol=1e-4, rtol=0)
