"""Images in token sequences: which are one, their ids, and input that does not fit together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import prefixtree as pt
from prefixtree.images.placements import place
from tests.support.hooks import put

VOCABULARY, IMAGE, VIDEO, START, END = 64, 60, 61, 62, 63


def config(model_type: str = "qwen3_vl", **text: Any) -> SimpleNamespace:
    """The entries of a model's configuration that are read."""
    return SimpleNamespace(
        model_type=model_type,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        text_config=SimpleNamespace(vocab_size=VOCABULARY, **text),
        vision_config=SimpleNamespace(spatial_merge_size=2, pooling_kernel_size=2),
    )


def patches(seed: int, *grid: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(np.prod(grid)), 6, generator=generator)


def shown(count: int, token: int = IMAGE) -> list[int]:
    """A run of placeholders between their marks."""
    return [START, *[token] * count, END]


GRIDS = [[1, 8, 4], [1, 8, 4], [1, 4, 4]]
A, B, C = (patches(i, *grid) for i, grid in enumerate(GRIDS))


def batch(pixels: Any, grids: Any, *sequences: list[int], **more: Any) -> pt.Images:
    return pt.Images.from_batch(sequences, pixels, grids, config(), **more)


def test_prefixes_are_one_where_images_are():
    rows = [
        [1, 2, *shown(8), 3, 4],
        [1, 2, *shown(8), 3, 5],
        [1, 2, *shown(8), 3, 4],  # other pixels alone
        [1, 2, *shown(8), 3, *shown(4), 6],
        [1, 2, 7],
    ]
    grids = [GRIDS[0], GRIDS[0], GRIDS[1], GRIDS[0], GRIDS[2]]
    found = batch(torch.cat([A, A, B, A, C]), torch.tensor(grids), *rows)
    assert found.of_sequences == [[0], [0], [1], [0, 2], []]
    assert len(found) == 3 and found.num_given == 5
    assert repr(found) == "Images(3 distinct of 5, 5 sequences)"
    assert found.first_id == VOCABULARY
    for row, ids, numbers in zip(rows, found.sequences, found.of_sequences, strict=True):
        assert np.array_equal(found.with_placeholders(ids), row)
        assert sorted(set(ids[ids >= VOCABULARY] - VOCABULARY)) == numbers
    forest = pt.PrefixForest.from_sequences(found.sequences)
    # [1, 2], a start: shared; A with its end and 3: shared by three
    assert forest.num_tokens == 2 + 1 + 1 + (8 + 2) + 2 + (1 + 4 + 2) + (8 + 3)
    assert pt.PrefixForest.from_sequences(rows).num_tokens < forest.num_tokens
    first = found.distinct[1]
    assert first.pixels.equal(B) and first.grid.tolist() == GRIDS[1] and first.run_tokens == 8
    assert first.key == pt.image_key(B.numpy(), GRIDS[1])


@pytest.mark.parametrize(
    "other",
    [
        {"pixels": A + 1e-6},
        {"grid": [1, 4, 8]},
        {"pixels": A.to(torch.bfloat16)},
        {"pixels": A.view(16, 12)},
        {"modality": "video"},
        {"modality": "video", "seconds": 0.5},
    ],
)
def test_everything_is_in_the_key(other):
    args = {"pixels": A, "grid": GRIDS[0]}
    assert pt.image_key(**args) == pt.image_key(A.clone().numpy(), np.array(GRIDS[0]))
    assert pt.image_key(**args) != pt.image_key(**args | other)
    half = dict(args, modality="video", seconds=torch.tensor(0.5))
    assert (pt.image_key(**half) == pt.image_key(**args | other)) == ("seconds" in other)


def test_images_in_a_list_are_hashed_once_and_keys_not_at_all(monkeypatch):
    hashed = []

    def counted(*args: Any) -> bytes:
        hashed.append(args)
        return pt.image_key(*args)

    put(monkeypatch, "key of an image", counted)
    rows = [[1, *shown(8)], [1, *shown(8), 2], [1, *shown(8)], [1, *shown(8), 2]]
    found = batch([A, A, B, A.clone()], GRIDS[:1] * 4, *rows)
    assert found.of_sequences == [[0], [0], [1], [0]] and len(hashed) == 3
    arrays = [A.numpy(), B.numpy()]
    again = batch([arrays[i] for i in (0, 0, 1, 0)], GRIDS[:1] * 4, *rows)
    assert again.of_sequences == found.of_sequences and len(hashed) == 5
    keyed = batch([A, A, B, A], GRIDS[:1] * 4, *rows, image_keys=["a", "a", "b", "a"])
    assert keyed.of_sequences == found.of_sequences and len(hashed) == 5


def test_videos():
    """Qwen3-VL writes frames apart, Qwen2.5-VL in one run, with seconds."""
    clip = patches(5, 3, 4, 4)
    grid = [[3, 4, 4]]
    apart = [1, *shown(4, VIDEO), 7, *shown(4, VIDEO), 8, *shown(4, VIDEO), 2]
    found = batch(None, None, apart, pixel_values_videos=clip, video_grid_thw=grid)
    assert found.of_sequences == [[0]] and found.distinct[0].runs == 3
    assert (found.sequences[0] == VOCABULARY).sum() == 12
    assert np.array_equal(found.with_placeholders(found.sequences[0]), apart)
    rows = [[1, *shown(12, VIDEO), 2]] * 3
    together = pt.Images.from_batch(
        rows,
        None,
        None,
        config("qwen2_5_vl"),
        pixel_values_videos=torch.cat([clip] * 3),
        video_grid_thw=grid * 3,
        second_per_grid_ts=[0.5, 1.0, 0.5],
    )
    assert together.of_sequences == [[0], [1], [0]]


def test_a_video_twice_on_a_path():
    """Its frames begin anew."""
    row = [1, *shown(4, VIDEO), 7, *shown(4, VIDEO), 8, *shown(4, VIDEO), 2]
    clip = {"pixel_values_videos": torch.cat([patches(5, 3, 4, 4)] * 2)}
    found = batch(None, None, row + row, **clip, video_grid_thw=[[3, 4, 4]] * 2)
    placements, paths = place(pt.pack(pt.PrefixForest.from_sequences(found.sequences)), found)
    assert placements.number.tolist() == [0] * 6
    assert placements.frame.tolist() == [0, 1, 2, 0, 1, 2]
    assert paths[0].numbers == [0, 0]


def test_gemma_has_positions_in_the_place_of_grids():
    positions = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(2), indexing="ij"), -1)
    padded = torch.full((2, 12, 2), -1)
    padded[0, :8] = positions.view(8, 2)
    padded[1, :8] = positions.flip(-1).view(8, 2)
    pixels = torch.randn(1, 12, 5).expand(2, 12, 5)
    row = [1, *shown(2), 4]
    found = pt.Images.from_batch(
        [row, row], pixels, None, config("gemma4"), image_position_ids=padded
    )
    assert found.of_sequences == [[0], [1]]
    with pytest.raises(ValueError, match="takes image_position_ids, not image_grid_thw"):
        pt.Images.from_batch([row], pixels[:1], [[1, 4, 2]], config("gemma4"))
    with pytest.raises(ValueError, match="takes image_grid_thw, not image_position_ids"):
        batch(pixels[:1], None, row, image_position_ids=padded[:1])
    with pytest.raises(ValueError, match=r"image_position_ids\[0\] has 7 patches that are no pad"):
        wrong = padded[:1].clone()
        wrong[0, 0] = -1
        args = ([row], pixels[:1], None, config("gemma4"))
        pt.Images.from_batch(*args, image_position_ids=wrong)
    with pytest.raises(ValueError, match=r"shape \[1, 12, 5\] and image_position_ids of shape \["):
        args = ([row], pixels[:1], None, config("gemma4"))
        pt.Images.from_batch(*args, image_position_ids=padded)
    with pytest.raises(pt.UnsupportedError, match="videos are not verified in model type 'gemma4'"):
        args = ([row], None, None, config("gemma4"))
        pt.Images.from_batch(*args, pixel_values_videos=pixels, video_grid_thw=padded)


@pytest.mark.parametrize("model_type", ["glm4v", "glm46v"])
def test_glm_writes_videos_with_the_placeholder_of_images(model_type):
    of = config(model_type)
    found = pt.Images.from_batch([[1, *shown(8)]], A, GRIDS[:1], of)
    assert found.placeholders == {"image": of.image_token_id}
    with pytest.raises(pt.UnsupportedError, match="videos are not verified in model type 'glm4"):
        pt.Images.from_batch(
            [[1, *shown(8)]], None, None, of, pixel_values_videos=A, video_grid_thw=GRIDS[:1]
        )


@pytest.mark.parametrize(
    ("message", "pixels", "grids", "rows"),
    [
        # the sequences against the images
        ("placeholders of image 1 of the batch, and 1 images were given", A, GRIDS[:1],
         [[1, *shown(8)], [1, *shown(8)]]),
        ("2 images were given, and the sequences hold 1", torch.cat([A, B]), GRIDS[:2],
         [[1, *shown(8)]]),
        (r"given; .* sampled shows no image.*suppress_tokens=.60.\)", A, GRIDS[:1],
         [[1, *shown(8), 2, IMAGE]]),
        (r"1 placeholders of .* sampled shows no image", A, GRIDS[:1], [[1, IMAGE, 2, *shown(8)]]),
        ("tokens 2 to 6: 5 placeholders of one image with 8: the sequence is cut inside an image",
         A, GRIDS[:1], [[1, *shown(8)[:6]]]),
        ("tokens 2 to 5: 4 placeholders of one image with 8 .grid .1, 8, 4..: the image is of an",
         A, GRIDS[:1], [[1, *shown(4)]]),
        ("two stand side by side", torch.cat([A, B]), GRIDS[:2], [[1, *shown(16)]]),
        (r"sequences\[1\] has the token id 64; ids from 64 on are beyond the vocabulary", A,
         GRIDS[:1], [[1, *shown(8)], [2, 64]]),
        # pixels against grids
        ("pixel_values has shape .31, 6.; image_grid_thw asks for .32, values., those of 1 image",
         A[:31], GRIDS[:1], [[1, *shown(8)]]),
        (r"pixel_values\[1\] has shape .32, 6.; image_grid_thw\[1\] asks for .16, values.", [A, B],
         [GRIDS[0], GRIDS[2]], [[1, *shown(8), 1, *shown(4)]]),
        ("pixel_values has 1 images, image_grid_thw 2", [A], GRIDS[:2], [[1, *shown(8)]]),
        (r"image_grid_thw\[0\] is .1, 32, 1.; expected .* multiples of 2", A, [[1, 32, 1]],
         [[1, *shown(8)]]),
        (r"image_grid_thw must be \[images, 3\]", A, [[8, 4]], [[1, *shown(8)]]),
        ("pixel_values came without image_grid_thw", A, None, [[1, *shown(8)]]),
        ("image_grid_thw came without pixel_values", None, GRIDS[:1], [[1, *shown(8)]]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(message, pixels, grids, rows):
    with pytest.raises(ValueError, match=message):
        batch(pixels, grids, *rows)


def test_bad_videos_and_keys_are_refused():
    clip = {"pixel_values_videos": patches(5, 3, 4, 4), "video_grid_thw": [[3, 4, 4]]}
    frame = shown(4, VIDEO)
    with pytest.raises(pt.ForestError, match="cut inside a video: 1 of its 3 frames are missing"):
        batch(None, None, [1, *frame, 7, *frame, 8], **clip)
    with pytest.raises(pt.ForestError, match="12 placeholders of one video with 4 per frame"):
        batch(None, None, [1, *shown(12, VIDEO), 8], **clip)
    with pytest.raises(pt.ForestError, match="this video follows the one before it without a tok"):
        batch(A, GRIDS[:1], [1, START, *[IMAGE] * 8, *[VIDEO] * 4, 7, *frame, 8, *frame], **clip)
    rows = [[1, *shown(8)], [1, *shown(8)]]
    with pytest.raises(ValueError, match=r"key \('image', 7\) have grids \[1, 8, 4\] and \[1, 4"):
        batch([A, A], [GRIDS[0], [1, 4, 8]], *rows, image_keys=[7, 7])
    with pytest.raises(ValueError, match="image_keys must have one entry per image: got 1 for 2"):
        batch([A, A], GRIDS[:2], *rows, image_keys=[7])


def test_families_that_are_not_served():
    for model_type, why in (
        ("gemma3", "tokens of an image see the later tokens"),
        ("llava", "not verified in model type 'llava', only in gemma4, glm46v, glm4v, qwen2_5_vl"),
        ("qwen3_vl_text", "give the configuration of the whole model"),
    ):
        with pytest.raises(pt.UnsupportedError, match=why):
            pt.Images.from_batch([[1]], None, None, config(model_type))
    both_ways = config("gemma4", use_bidirectional_attention="vision")
    with pytest.raises(pt.UnsupportedError, match='attention="vision" are not served: tokens of'):
        pt.Images.from_batch([[1]], None, None, both_ways)


def test_ids_of_other_images_are_refused():
    one = batch(A, GRIDS[:1], [1, *shown(8)])
    with pytest.raises(pt.ForestError, match=r"hold image 1 \(token id 65\), and there are 1"):
        one.with_placeholders(np.array([1, 65]))
    # without images of a modality its placeholders are text
    none = batch(None, None, [1, IMAGE, IMAGE, 2, VIDEO])
    assert none.with_placeholders(none.sequences[0]).tolist() == [1, IMAGE, IMAGE, 2, VIDEO]
    sampled = batch(A, GRIDS[:1], [1, *shown(8), VIDEO])
    assert sampled.sequences[0].tolist() == [1, START, *[64] * 8, 63, VIDEO]
