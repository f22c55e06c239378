"""Writes docs/families.md and the README's count of types from results of test_families.py.

    python -m tests.support.family_table RESULTS.xml ...

A file is pytest's --junitxml of one version of transformers; `make families` makes them all. The
figures, the versions and what was skipped come from the files, and of types whose layers carry a
state also what else a test has proven; what a family's tiny configuration turns on is said here.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

from packaging.version import parse

from prefixtree.models.unserved import UNSERVED
from tests.support.family_configs import FAMILIES
from tests.support.hybrid_configs import HYBRIDS
from tests.support.variant_configs import PARTS

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs/families.md"
# types of causal language models in the newest transformers that is tested
NEWEST, TOTAL = "5.24", 196

# models of the family, and what the proof covers besides RoPE, grouped queries and a gated MLP
ABOUT: dict[str, tuple[str, str]] = {
    "afmoe": ("Trinity", "windows, gated attention, experts (shared too)"),
    "apertus": ("Apertus", "xIELU, normed queries and keys, llama3 RoPE"),
    "apertus1p5_text": ("Apertus 1.5 (text)", "as apertus"),
    "arcee": ("AFM 4.5B", "squared ReLU, biases, YaRN"),
    "aria_text": ("Aria (text)", "experts (shared too), biases"),
    "axk2": (
        "A.X K2",
        "MLA, indexer, gated norms, experts (shared too), bias",
    ),
    "axk1": ("A.X K1", "MLA (D != Dv), experts (grouped, shared), bias, YaRN"),
    "bailing_hybrid": (
        "Bailing hybrid",
        "states (Kimi delta rule), MLA, experts (grouped, shared)",
    ),
    "bamba": ("Bamba 9B", "states (Mamba-2), convolutions"),
    "beam": (
        "Beam",
        "windows, full layers without RoPE, experts (grouped), softcap of logits, bias",
    ),
    "bitnet": ("BitNet b1.58 (unquantised)", "squared ReLU, norms inside attention and MLP, bias"),
    "cohere": ("Command R, R+", "logit scale, parallel block, normed queries and keys, bias"),
    "cohere2": ("Command R7B, Command A", "logit scale, parallel block, windows"),
    "cohere2_moe": ("Cohere 2 MoE", "logit scale, windows, experts"),
    "cwm": ("CWM 32B", "windows, llama3 RoPE"),
    "deepseek_v2": ("DeepSeek V2, V2-Lite", "MLA (D != Dv), experts (grouped, shared)"),
    "deepseek_v3": ("DeepSeek V3, R1", "MLA (D != Dv), experts (grouped, shared), YaRN"),
    "deepseek_v32": (
        "DeepSeek V3.2",
        "MLA, indexer, experts (grouped), YaRN",
    ),
    "deepseek_v4": (
        "DeepSeek V4",
        "compressed keys, indexer, windows, sinks, experts (by hash too), hyper-connections",
    ),
    "dots1": ("dots.llm1", "windows, experts (grouped, shared)"),
    "dots3_note_text": (
        "dots.note (text)",
        "MLA, indexer, windows, two head sizes, gated attention, experts (grouped)",
    ),
    "ernie4_5": ("ERNIE 4.5 0.3B", "interleaved RoPE, biases"),
    "ernie4_5_moe": ("ERNIE 4.5 21B", "interleaved RoPE, biases, experts (shared too)"),
    "exaone": ("EXAONE 3.0, 3.5", "llama3 RoPE"),
    "exaone4": ("EXAONE 4.0", "windows, full layers without RoPE, post-norm"),
    "exaone_moe": ("K-EXAONE", "windows, experts (grouped, shared)"),
    "falcon_h1": ("Falcon-H1", "states (Mamba-2) beside attention in each layer, multipliers"),
    "flex_olmo": ("FlexOlmo", "experts, post-norm"),
    "flint": ("Flint", "sinks, windows, experts (shared too), bias"),
    "gemma": ("Gemma 1", "scaled embeddings"),
    "gemma2": ("Gemma 2", "softcap of scores and of logits, windows, scale"),
    "gemma3": ("Gemma 3 (text of)", "as gemma3_text, no softcap of logits"),
    "gemma3_text": ("Gemma 3 (text)", "windows, two RoPEs (linear), softcap of logits, scale"),
    "gemma3n_text": ("Gemma 3n (text)", "AltUp, Laurel, shared keys, windows, softcap of logits"),
    "gemma4": ("Gemma 4 with images", "as gemma4_text, [images](images.md) where causal"),
    "gemma4_text": (
        "Gemma 4 (text)",
        "two head sizes, windows, shared keys, keys as values, experts, softcap of logits",
    ),
    "gemma4_unified_text": (
        "Gemma 4 unified (text)",
        "two head sizes, windows, shared keys, keys as values, softcap of logits",
    ),
    "glm": ("GLM-4 9B", "partial RoPE, biases"),
    "glm4": ("GLM-4-0414", "partial RoPE, biases, sandwich norm"),
    "glm4v": ("GLM-4.1V", "3-D RoPE, partial RoPE, biases, [images](images.md)"),
    "glm46v": ("GLM-4.6V (dense)", "as glm4v"),
    "glm4_moe": ("GLM-4.5, 4.6", "partial RoPE, experts (grouped, shared), normed queries"),
    "glm4_moe_lite": ("GLM-4.7-Flash", "MLA (D != Dv), experts (grouped, shared)"),
    "glm_moe_dsa": (
        "GLM-5",
        "MLA, indexer, layers that share its choice, experts (grouped, shared)",
    ),
    "gpt2": ("GPT-2", "learned positions, fused projections, scale by layer"),
    "gpt_neox": ("Pythia, GPT-NeoX", "partial RoPE, parallel block, fused projections, biases"),
    "gpt_oss": ("gpt-oss", "sinks, windows, experts with biases, YaRN"),
    "granite": ("Granite 3", "four multipliers, logit divisor, biases"),
    "granite_swa": (
        "Granite SWA",
        "sinks, windows, RoPE by layer, four multipliers, logit divisor, biases",
    ),
    "granitemoe": ("Granite 3 MoE", "four multipliers, logit divisor, experts"),
    "granitemoe_swa": ("Granite SWA MoE", "as granite_swa, experts (shared too)"),
    "granitemoehybrid": (
        "Granite 4.0 H",
        "states (Mamba-2), four multipliers, logit divisor, experts (shared too)",
    ),
    "granitemoeshared": ("Granite 3 MoE, shared", "as granitemoe, a shared expert too"),
    "helium": ("Helium", "interleaved RoPE, biases"),
    "hunyuan_v1_dense": ("Hunyuan dense", "normed queries, biases"),
    "hunyuan_v1_moe": ("Hunyuan A13B (likewise)", "normed queries, biases, experts (shared too)"),
    "hy_v3": ("Hunyuan 3", "experts (shared too), dense first layer"),
    "hy_v4": (
        "HY V4",
        "as glm_moe_dsa, sinks, gated attention, hyper-connections",
    ),
    "hyperclovax": ("HyperCLOVA X SEED", "four multipliers, logit scale, post-norm, biases"),
    "internlm3": ("InternLM 3", "biases"),
    "internvl": ("InternVL 3, 3.5 (text of)", "as qwen2; as qwen3 and others in their place"),
    "iquestcoder": ("IQuest-Coder V1", "biases"),
    "jais2": ("Jais 2", "squared ReLU, layer norms, biases"),
    "jetmoe": ("JetMoE 8B (not checkpointed)", "experts in attention and MLP"),
    "kimi_linear": (
        "Kimi Linear 48B-A3B",
        "states (Kimi delta rule), MLA, experts (grouped, shared)",
    ),
    "kolibri1": ("Kolibri 1", "windows, experts (shared too), normed queries and keys"),
    "laguna": ("Laguna", "heads by layer, gated attention, windows, experts (shared too)"),
    "lara_mini": (
        "Lara mini",
        "states (gated delta rule), windows, experts (gated shared one)",
    ),
    "lfm2": ("LFM2", "convolutions (gated, 3 taps)"),
    "lfm2_moe": ("LFM2 8B-A1B", "convolutions (gated, 3 taps), experts"),
    "lfm3": ("LFM3", "convolutions (gated, 5 taps), windows, gated attention, sandwich norm"),
    "llama": ("Llama 2, 3; Yi; SmolLM 2", "biases, llama3 RoPE"),
    "longcat_flash": (
        "LongCat-Flash",
        "two MLAs per layer (D != Dv), experts that do nothing, bias",
    ),
    "mellum": ("Mellum 2", "windows, two RoPEs, experts, bias"),
    "mimo_v2_flash": (
        "MiMo-V2-Flash",
        "sinks, windows, D != Dv, key heads by layer, two partial RoPEs, experts (grouped)",
    ),
    "minicpm3": ("MiniCPM3 4B", "MLA (D != Dv), multipliers, biases"),
    "minimax_m2": ("MiniMax M2", "partial RoPE, normed queries and keys, experts"),
    "minimax_m3_vl_text": (
        "MiniMax M3 (text)",
        "indexer of blocks, a choice per key head, partial RoPE, experts (shared too)",
    ),
    "ministral": ("Ministral 8B", "windows"),
    "ministral3": ("Ministral 3", "scale by position, windows, YaRN"),
    "mistral": ("Mistral 7B, Nemo", "windows"),
    "mistral3": ("Mistral Small 3.1; Ministral 3 (text of)", "as mistral or ministral3"),
    "mixtral": ("Mixtral", "windows, experts"),
    "modernbert-decoder": ("ModernBERT decoder (Ettin)", "windows, layer norms, head bias, biases"),
    "nanochat": ("nanochat", "softcap of logits, squared ReLU, norms without weights"),
    "nemotron_h": (
        "Nemotron-H",
        "states (Mamba-2), layers of one part each, experts (shared too)",
    ),
    "olmo": ("OLMo 1", "clipped projections, norms without weights, bias"),
    "olmo2": ("OLMo 2", "post-norm, normed queries and keys, bias"),
    "olmo3": ("OLMo 3", "post-norm, windows, bias"),
    "olmo_hybrid": ("OLMo hybrid", "states (gated delta rule, negative eigenvalues)"),
    "olmoe": ("OLMoE", "clipped projections, normed queries and keys, experts"),
    "opt": ("OPT", "learned positions, narrow embeddings, norm before or after, biases"),
    "phi": ("Phi 1, 1.5, 2", "partial RoPE, parallel block, head bias, normed queries"),
    "phi3": ("Phi 3, Phi 4", "fused projections, partial RoPE, windows"),
    "qwen2": ("Qwen 2, 2.5; R1 distills", "biases, windows"),
    "qwen2_5_vl": ("Qwen2.5-VL", "3-D RoPE, windows, biases, [images](images.md)"),
    "qwen2_moe": ("Qwen1.5-MoE, Qwen2-57B", "experts (gated shared one), biases"),
    "qwen3": ("Qwen 3", "normed queries and keys, windows, bias"),
    "qwen3_5": (
        "Qwen3.5, 3.6",
        "states (gated delta rule, fewer key heads), gated attention, 3-D RoPE, "
        "[images](images.md)",
    ),
    "qwen3_5_moe": ("Qwen3.5 MoE", "as qwen3_5, experts (gated shared one)"),
    "qwen3_moe": ("Qwen3 30B-A3B, 235B", "experts, windows"),
    "qwen3_next": (
        "Qwen3-Next 80B-A3B",
        "states (gated delta rule), gated attention, experts (gated shared one)",
    ),
    "qwen3_vl": ("Qwen3-VL", "interleaved 3-D RoPE, biases, [images](images.md)"),
    "qwen3_vl_moe": ("Qwen3-VL 30B-A3B, 235B", "as qwen3_vl, experts"),
    "sarvam_mla": ("Sarvam 105B", "MLA (D != Dv), experts (grouped, shared), bias, YaRN"),
    "sarvam_moe": ("Sarvam 30B", "experts (grouped, shared), bias"),
    "seed_oss": ("Seed-OSS 36B", "biases"),
    "smollm3": ("SmolLM 3", "layers without RoPE, windows, biases"),
    "solar_open": ("Solar Open", "experts (grouped, shared)"),
    "starcoder2": ("StarCoder 2", "windows, layer norms, biases"),
    "vaultgemma": ("VaultGemma", "softcap of scores and of logits, windows, scale"),
    "youtu": ("Youtu-LLM", "MLA (D != Dv), bias"),
    "zamba2": ("Zamba2", "states (Mamba-2), one attention that layers share, with adapters"),
}

_HEAD = """# Families

<!-- written by `make families` from the results of `tests/models/test_families.py` -->

A test has proven each family on this list. It builds a tiny model whose configuration uses all
special parts of the family. It compares the packed forest with the family's eager attention,
sequence by sequence, in float32: log-probabilities, entropies and the gradient of every parameter,
without checkpointing and with both kinds of it. Every figure must be below 1e-5, or below 5e-5 in
DeepSeek V4 and families whose layers carry a state. Those are proven in float64 too
(`tests/states/test_hybrids.py`, `test_indexers.py`): log-probabilities agree to 1e-11, gradients to
1e-10.

- **log p** is the largest difference of a log-probability, over the largest magnitude of one.
- **gradient** is the norm of the difference over the norm of the gradient, for the worst parameter.
  Both are the worst of all versions and kinds of checkpointing.
- **transformers** lists the versions in which the test ran; all are 5.5.0, 5.17.0, 5.23.0 and
  5.24.0. In the others the type does not exist, or is refused.
- Layers with an [indexer](sparse.md) need transformers 5.23 (DeepSeek V4, MiniMax M3: 5.17).
- Layers that carry a state need transformers 5.17 (LFM2: 5.23, Lara mini: 5.24).
  `sequence_logprobs` prepares both by itself. Call `prefixtree.prepare(model)` before a bare
  `model(...)`.
- Reentrant checkpointing is refused where layers share keys (some Gemma 3n and 4).
- This table is of text. The page on [images](images.md) has their figures.
- Refused in every family are active dropout, router noise, `dynamic` and `longrope` RoPE at
  [some lengths](exactness.md#refused), and [more](refusals.md#every-model). The model types
  that are refused are [below](#refused).

{count} model types run: those of the table, and as text parts of larger models
<!-- families -->{parts}<!-- /families -->.

| model type | models | covered besides RoPE and GQA | transformers | log p | gradient |
|---|---|---|---|---|---|
"""

_STATES = """
## Layers that carry a state

What tests have proven: [steps](larger-trees.md) (`max_step_tokens=`), [groups](parallel.md) in both
modes, the [sampler](rollouts.md).

| model type | {columns} |
|{lines}|
"""
# column -> the test of it, whose names end so for a family
PROOFS = {
    "one forward": ("models.test_families", "test_equals_eager_one_by_one[{}-none]"),
    "steps": ("scoring.test_states_in_steps", "test_every_family_with_states[{}]"),
    "groups, parts": (
        "scoring.test_states_in_groups",
        "test_every_family_with_states[{}-parts]",
    ),
    "groups, heads": (
        "scoring.test_states_in_groups",
        "test_every_family_with_states[{}-heads]",
    ),
    "sampler": ("sampling.test_families", "test_equals_generate_and_eager[{}]"),
}

# its code runs in tests/models/test_text_of_vision.py
_TEXT_OF_VISION = r"""
## Text of a vision checkpoint

Gemma 3, Mistral Small 3.1, Ministral 3 and InternVL run whole, on text; their images are refused.
A trainer gets the tokenizer, not the processor. Ministral 3's checkpoints are of the type
`mistral3`: load them with `AutoModelForImageTextToText`.
A text class leaves all weights random unless it is told their names, and the lm_head where the
text's configuration does not tie it:

```python
whole = AutoConfig.from_pretrained(path)
text = whole.get_text_config()
text.tie_word_embeddings = whole.tie_word_embeddings
part = r"^(?:model\.)?language_model\."
names = {part + "lm_head": "lm_head", part + r"(?:model\.)?": "model."}
model = AutoModelForCausalLM.from_pretrained(path, config=text, key_mapping=names)
```
"""

_REFUSED = """
## Refused

transformers {newest} has {total} types of causal language models. Each of them runs or is in this
table, but for `gpt-sw3`, which loads as `gpt2` and so runs. The error that refuses a type gives its
reason.

| model type | why |
|---|---|
"""


def read(paths: list[str]) -> tuple[dict[str, dict[str, float]], dict[str, set[str]]]:
    """The worst figures and the versions of each family; an error if any proof failed (those of
    the table itself are red until it is written)."""
    worst: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    versions: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            is_red = case.find("failure") is not None or case.find("error") is not None
            if is_red and not str(case.get("name")).startswith("test_the_table"):
                raise SystemExit(f"{path}: {case.get('name')} failed; mend it first")
            found = re.fullmatch(
                r"test_equals_eager_one_by_one\[(.+?)-(none|reentrant|non-reentrant)\]",
                case.get("name", ""),
            )
            properties = {p.get("name"): p.get("value", "") for p in case.iter("property")}
            if found is None or not properties:
                continue
            family = found[1].partition("/")[0]
            versions[family].add(properties["transformers"])
            for name in ("logprob", "gradient"):
                worst[family][name] = max(worst[family][name], float(properties[name]))
    return worst, versions


def passed_in(paths: list[str]) -> set[tuple[str, str]]:
    """The module below tests, and the name, of each test that ran and passed."""
    return {
        (case.get("classname", "").removeprefix("tests."), case.get("name", ""))
        for path in paths
        for case in ElementTree.parse(path).getroot().iter("testcase")
        if not {"failure", "error", "skipped"} & {child.tag for child in case}
    }


def states(passed: set[tuple[str, str]]) -> str:
    """The section of docs/families.md on types whose layers carry a state, a row per result."""
    types: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for family in sorted(HYBRIDS):
        proven = tuple(
            "yes" if (module, name.format(family)) in passed else "no"
            for module, name in PROOFS.values()
        )
        types[proven].append(f"`{family}`")
    rows = [f"| {', '.join(names)} | {' | '.join(row)} |\n" for row, names in types.items()]
    lines = "|".join(["---"] * (1 + len(PROOFS)))
    return _STATES.format(columns=" | ".join(PROOFS), lines=lines) + "".join(rows)


def table(
    worst: dict[str, dict[str, float]],
    versions: dict[str, set[str]],
    passed: set[tuple[str, str]],
) -> str:
    """docs/families.md."""
    rows = []
    for family in sorted(FAMILIES):
        models, covered = ABOUT[family]
        ran = _ran(versions[family], set().union(*versions.values()))
        figures = f"{worst[family]['logprob']:.1e} | {worst[family]['gradient']:.1e}"
        rows.append(f"| `{family}` | {models} | {covered} | {ran} | {figures} |\n")
    return _head() + "".join(rows) + states(passed) + _TEXT_OF_VISION + refused()


def _ran(versions: set[str], tested: set[str]) -> str:
    """The versions in which a family ran, of those that were tested."""
    if versions == tested:
        return "all"
    first = min(versions, key=parse)
    if versions == {version for version in tested if parse(version) >= parse(first)}:
        return f"from {first}"
    return ", ".join(sorted(versions, key=parse))


def refused() -> str:
    """The section of docs/families.md on types that are refused, one row per reason."""
    types: dict[str, list[str]] = defaultdict(list)
    for model_type, reason in UNSERVED.items():
        types[reason].append(f"`{model_type}`")
    rows = [f"| {', '.join(names)} | {reason} |\n" for reason, names in types.items()]
    return _REFUSED.format(total=TOTAL, newest=NEWEST) + "".join(rows)


def model_types() -> list[str]:
    """The families, and the text parts of those that are a part of a larger model."""
    return sorted([*FAMILIES, *PARTS])


def _head() -> str:
    return _HEAD.format(count=len(model_types()), parts=", ".join(sorted(PARTS)))


def counted(readme: str) -> str:
    """README's text with the number of model types between its markers."""
    marked = re.compile("(?<=<!-- families -->).*?(?=<!-- /families -->)")
    return marked.sub(f"{len(model_types())} model types", readme)


def main(paths: list[str]) -> None:
    """Writes both files; refuses results that leave a family out."""
    worst, versions = read(paths)
    if missing := FAMILIES.keys() - versions.keys():
        raise SystemExit(f"no results for {', '.join(sorted(missing))}")
    if ABOUT.keys() != FAMILIES.keys():
        raise SystemExit(f"ABOUT and FAMILIES differ: {sorted(ABOUT.keys() ^ FAMILIES.keys())}")
    TABLE.write_text(table(worst, versions, passed_in(paths)))
    readme = ROOT / "README.md"
    readme.write_text(counted(readme.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
