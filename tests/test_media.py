"""Pictures travel with their samples: into a shard, a padded batch, the model; never into a pack."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import sample

from rlbatch.collate import collate, unpack
from rlbatch.dialects import as_dict
from rlbatch.errors import RecordError, StorageError
from rlbatch.records import MediaArray, Sample, identical
from rlbatch.records.media import RESERVED_NAMES
from rlbatch.scoring import ModelInputs, model_inputs
from rlbatch.storage import open_reader, write_shard
from rlbatch.storage.media import decode_media, encode_media


def media(**arrays: np.ndarray) -> tuple[MediaArray, ...]:
    return tuple(MediaArray(name=name, values=values) for name, values in arrays.items())


def three() -> list[Sample]:
    """Two patches, none, and one; with the sizes that a model computes positions from."""
    a = sample([1, 9, 9, 5], [7, 2], [-0.25, -0.5], trajectory_id="a")
    b = sample([1], [8], [-0.75], trajectory_id="b")
    c = sample([1, 9], [6], [-1.0], trajectory_id="c")
    two, one = np.float32([[1, 2, 3], [4, 5, 6]]), np.float32([[7, 8, 9]])
    return [
        replace(a, media=media(pixel_values=two, image_grid_thw=np.array([[1, 1, 2]]))),
        b,
        replace(c, media=media(pixel_values=one, image_grid_thw=np.array([[1, 1, 1]]))),
    ]


@pytest.mark.parametrize("change", [lambda batch: batch, lambda batch: pickle.loads(pickle.dumps(batch))])
def test_media_are_joined_by_name_and_the_model_computes_its_positions(change):
    batch = change(collate(three(), layout="padded"))
    assert batch.position_ids is None
    pixels, grid = batch.media
    assert (pixels.name, pixels.num_rows, grid.name, grid.num_rows) == (
        "pixel_values",
        (2, 0, 1),
        "image_grid_thw",
        (1, 0, 1),
    )
    assert pixels.values.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert grid.values.tolist() == [[1, 1, 2], [1, 1, 1]]
    assert grid.values.dtype == torch.int64
    inputs = model_inputs(batch)
    assert "position_ids" not in inputs
    assert inputs["pixel_values"] is pixels.values


def test_they_lie_in_the_buffer_and_move_with_it(device):
    batch = collate(
        three(), layout="padded", allocate=lambda size: torch.full((size,), 255, dtype=torch.uint8)
    )
    storage = batch.buffer.untyped_storage().data_ptr()
    assert all(part.values.untyped_storage().data_ptr() == storage for part in batch.media)
    moved = batch.to(device)
    assert moved.media[0].values.device.type == device.type
    assert torch.equal(moved.media[0].values.cpu(), batch.media[0].values)


def test_packing_them_is_refused_by_name():
    with pytest.raises(RecordError, match="no media in a packed batch, found some in sample 'a:0'"):
        collate(three(), layout="packed")


def test_one_name_has_one_dtype_and_shape():
    first, second = (
        replace(sample([1], [2], [-1.0]), media=media(pixel_values=np.zeros(shape, np.float32)))
        for shape in ((1, 3), (1, 4))
    )
    with pytest.raises(RecordError, match=r"pixel_values of one dtype and shape, found float32 \[N, 3\] and"):
        collate([first, second], layout="padded")


def test_a_shard_gives_back_what_it_was_given(tmp_path):
    write_shard(tmp_path / "a.safetensors", three())
    back = open_reader(tmp_path / "a.safetensors").samples()
    assert [identical(a, b) for a, b in zip(three(), back, strict=True)] == [True] * 3
    assert [
        identical(a, b) for a, b in zip(three(), unpack(collate(back, layout="padded")), strict=True)
    ] == [True] * 3


def test_unpack_gives_them_back():
    back = unpack(collate(three(), layout="padded"))
    assert all(identical(a, b) for a, b in zip(back, three(), strict=True))


@pytest.mark.parametrize(
    ("data", "kinds"),
    [
        (b"1234", b"[]"),
        (b"123", b'[["pixel_values", "float32", [1]]]'),
        (b"1234", b'[["pixel_values", "float32", [-1]]]'),
        (b"1234", b'[["pixel_values", "object", [1]]]'),
        (b"1234", b'[["a", "uint8", [2]], ["a", "uint8", [2]]]'),
        (b"1234", b"[[1]]"),
        (b"1234", b"{"),
    ],
)
def test_bytes_that_are_no_media_are_refused(data, kinds):
    with pytest.raises((ValueError, KeyError, TypeError)):
        decode_media(data, kinds)


def test_every_dtype_survives():
    arrays = media(
        a=np.array([True, False]),
        b=np.uint8([1]),
        c=np.int32([[-1]]),
        d=np.float16([0.5]),
        e=np.zeros((0, 3), np.int64),
    )
    assert identical(decode_media(*encode_media(arrays)), arrays)


def test_a_damaged_list_of_kinds_is_an_altered_shard(tmp_path):
    path = tmp_path / "a.safetensors"
    write_shard(path, three())
    content = bytearray(path.read_bytes())
    content[content.index(b'"pixel_values"') + 1] ^= 1
    path.write_bytes(content)
    with pytest.raises(StorageError, match="shard-altered"):
        open_reader(path).samples()


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ([1, 2], "numpy array"),
        (np.array(1.0, np.float32), "at least one axis"),
        (np.zeros(2), "float64"),
    ],
)
def test_what_is_no_media_is_refused(values, match):
    with pytest.raises(RecordError, match=match):
        MediaArray(name="pixel_values", values=values)


def test_names_come_once_and_media_are_media():
    made = sample([1], [2], [-1.0])
    with pytest.raises(RecordError, match="each name once"):
        replace(made, media=media(a=np.zeros(1, np.uint8)) * 2)
    with pytest.raises(RecordError, match="expected MediaArray, found"):
        replace(made, media=(np.zeros(1),))


def test_no_medium_replaces_what_the_tokens_decide():
    arguments = {"input_ids", "position_ids", "attention_mask", "use_cache"}
    assert arguments == set(ModelInputs.__annotations__)
    assert arguments < set(RESERVED_NAMES)
    for name in RESERVED_NAMES:
        with pytest.raises(RecordError, match=rf"found '{name}', which the tokens decide"):
            MediaArray(name=name, values=np.zeros((1, 3), np.int64))


def test_a_shard_that_names_a_medium_so_is_refused():
    data, kinds = encode_media(media(pixel_values=np.zeros((1, 3), np.int64)))
    with pytest.raises(RecordError, match="which the tokens decide"):
        decode_media(data, kinds.replace(b"pixel_values", b"input_ids"))


def test_no_dialect_loses_them_silently():
    for dialect in ("trl", "verl", "prime_rl", "tinker"):
        with pytest.raises(RecordError, match="media of sample 'a:0' would be lost"):
            as_dict(collate(three(), layout="padded"), dialect)
        as_dict(collate(three(), layout="padded"), dialect, drop=["media"])
