"""Text of checkpoints with a vision encoder, whose images are refused: loading, refusals, verify.
That they equal eager is proven with all families."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import prefixtree as pt
from tests.support.family_table import TABLE
from tests.support.full import mostly
from tests.support.models import build, cases, ragged_sequences

NAMES = ("gemma3", "mistral3", "mistral3/of ministral3", "internvl")


@pytest.fixture(scope="module")
def packed() -> pt.PackedForest:
    return pt.pack(pt.PrefixForest.from_sequences(ragged_sequences()[:4]))


def _page() -> str:
    found = re.search(r"## Text of a vision.*?```python\n(.*?)```", TABLE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def _saved(name: str, path: Any) -> Any:
    # the whole caps no logits, its text class would; published configurations have no cap
    model = build(name, final_logit_softcapping=None) if name == "gemma3" else build(name)
    model.tie_weights()
    model.save_pretrained(path)
    return model


def _difference(a: Any, b: Any, packed: pt.PackedForest) -> float:
    with torch.no_grad():
        pairs = zip(*(pt.sequence_logprobs(m, packed).logprobs for m in (a, b)), strict=True)
    return max(float((x - y).abs().max()) for x, y in pairs)


@pytest.mark.parametrize("name", mostly(cases(NAMES), {NAMES[2]}))
def test_a_checkpoint_loads_whole_and_as_text(name: str, packed: Any, tmp_path: Any) -> None:
    saved = _saved(name, tmp_path)
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="prefixtree")
    assert _difference(whole, saved, packed) == 0
    code = {"AutoConfig": AutoConfig, "AutoModelForCausalLM": AutoModelForCausalLM}
    exec(_page(), code := {**code, "path": tmp_path})
    text = code["model"]
    assert type(text) is not type(whole)
    assert _difference(pt.prepare(text), saved, packed) < 1e-6
    # two mistakes that the page names: names as they are, and the text's own word on its head
    own = AutoConfig.from_pretrained(tmp_path).get_text_config()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, config=own)
    assert _difference(pt.prepare(plain), saved, packed) > 0.1
    if not own.tie_word_embeddings:
        with_names = {"config": own, "key_mapping": code["names"]}
        torn = AutoModelForCausalLM.from_pretrained(tmp_path, **with_names)
        assert _difference(pt.prepare(torn), saved, packed) > 0.1


@pytest.mark.full
@pytest.mark.parametrize("start", ["language_model.model.", "model.language_model."])
def test_names_of_other_versions(start: str, packed: Any, tmp_path: Any) -> None:
    """The page's names fit what any version of transformers saves."""
    saved = _saved("internvl", tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    kept = {
        re.sub(r"^(model\.)?language_model\.(model\.)?", start, name): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(kept, path, metadata={"format": "pt"})
    code = {"AutoConfig": AutoConfig, "AutoModelForCausalLM": AutoModelForCausalLM}
    exec(_page(), code := {**code, "path": tmp_path})
    assert _difference(pt.prepare(code["model"]), saved, packed) < 1e-6


@pytest.mark.parametrize("name", cases(NAMES[:1]))
def test_images_are_refused(name: str, packed: Any) -> None:
    model = build(name)
    with pytest.raises(pt.UnsupportedError, match="images of model type 'gemma3' are not served"):
        pt.Images.from_batch([[1]], None, None, model.config)
    with pytest.raises(pt.UnsupportedError, match="SiglipAttention attends both ways"):
        model(**packed.model_inputs(), pixel_values=torch.randn(1, 3, 28, 28))
    with pytest.raises(pt.UnsupportedError, match="adds its own mask function"):
        model(**packed.model_inputs(), token_type_ids=torch.zeros_like(packed.input_ids)[None])
    model.config.image_token_id = int(packed.input_ids[0])
    with pytest.warns(UserWarning, match="read as text.* which is not verified here: drop them"):
        pt.sequence_logprobs(model, packed)


@pytest.mark.full
@pytest.mark.parametrize("name", cases(NAMES))
def test_verify_loads_the_whole(name: str, tmp_path: Any) -> None:
    from prefixtree.testing.models import Setting
    from prefixtree.testing.models import build as build_for_verify

    _saved(name, tmp_path)
    model = build_for_verify(Setting(str(tmp_path), device="cpu"), "prefixtree")
    assert pt.verify(copy.deepcopy(model), ragged_sequences()[:4]).passed
