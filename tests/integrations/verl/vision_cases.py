"""Comparisons of checkpoints with a vision encoder, on text alone and with images; those of hybrids
are in `runs.HYBRID_CASES`."""

from __future__ import annotations

from tests.integrations.verl.cases import Settings

VISION_CASES: dict[str, Settings] = {
    # verl's own engine fails here (BaseModelOutputWithPooling has no mean)
    "qwen2_5_vl, text": Settings(model="qwen2_5_vl", beside="alone"),
    "qwen2_5_vl, images": Settings(model="qwen2_5_vl", images="all", tokens=120),
    "qwen3_vl, text, decay": Settings(model="qwen3_vl", weight_decay=0.1),
    "qwen3_vl, images": Settings(model="qwen3_vl", images="all", lr=0.2),
    "qwen3_vl_moe, text, decay": Settings(model="qwen3_vl_moe", weight_decay=0.1),
    "qwen3_vl_moe, images": Settings(model="qwen3_vl_moe", images="all", lr=0.2),
    "qwen3_vl, lora": Settings(
        model="qwen3_vl",
        images="all",
        model_options={"lora_rank": 4, "lora_alpha": 8},
        lr=1.0,
    ),
    "qwen3_vl, one rank sees": Settings(model="qwen3_vl", images="first", lr=0.3),
    # beside one rank: verl's vision encoder would run the tests' stand-in for flash attention, a
    # causal one
    "qwen3_vl, text, two ranks a forest": Settings(
        model="qwen3_vl",
        engine={"ulysses_sequence_parallel_size": 2},
        tokens=30,
        beside="prefixtree",
    ),
    "qwen3_vl, images, two ranks a forest": Settings(
        model="qwen3_vl",
        engine={"ulysses_sequence_parallel_size": 2},
        images="all",
        tokens=60,
        lr=0.2,
        beside="prefixtree",
    ),
    "qwen3_vl, fixed size": Settings(model="qwen3_vl", images="all", tokens=None, size=2),
}
