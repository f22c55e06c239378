"""GRPO, RLOO, SFT and DPO with images: beside TRL's trainers, from equal weights and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from accelerate import Accelerator
from packaging.version import Version
from transformers import AutoModelForImageTextToText
from trl import DPOTrainer, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTTrainer

import prefixtree as pt
from prefixtree.integrations.core import batch as core
from prefixtree.integrations.core import trunks
from prefixtree.integrations.trl import (
    PrefixTreeDPOTrainer,
    PrefixTreeGRPOTrainer,
    PrefixTreeRLOOTrainer,
    PrefixTreeSFTTrainer,
    kept_windows,
)
from prefixtree.integrations.trl.images import RowImages
from prefixtree.integrations.trl.refusals import check_images
from prefixtree.planning.costs import ImportCost
from prefixtree.recompute.choose import encoder_memory_of
from tests.integrations.trl.image_runs import captions, chats, pairs, processor, save_vision_model
from tests.integrations.trl.runs import (
    SameOrder,
    assert_equal_runs,
    make,
    parameters,
    worst_parameter,
)
from tests.integrations.trl.sample_runs import make_dpo, make_sft, ratios
from tests.support.hooks import lose_images, lose_keys, wrap

SGD = {"optim": "sgd", "learning_rate": 0.3, "max_steps": 2}
OLD = Version(trl.__version__) < Version("1.16")


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("qwen3_vl"))


def made(
    trainer: type[GRPOTrainer], folder: Path, options: Any = None, **arguments: Any
) -> GRPOTrainer:
    """With a processor of images, which does not generate tokens that stand for some."""
    shown = processor(folder)
    names = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>")
    held = [shown.tokenizer.convert_tokens_to_ids(name) for name in names]
    return make(
        trainer,
        folder,
        model=AutoModelForImageTextToText.from_pretrained(folder),
        options={"processing_class": shown, "train_dataset": chats(), **(options or {})},
        generation_kwargs={"suppress_tokens": held},
        **{**SGD, **arguments},
    )


def trained(
    trainer: type[GRPOTrainer], folder: Path, options: Any = None, **arguments: Any
) -> GRPOTrainer:
    """The constructor seeds what generates."""
    found = made(trainer, folder, options, **arguments)
    found.train()
    return found


def start(folder: Path) -> dict[str, torch.Tensor]:
    return parameters(AutoModelForImageTextToText.from_pretrained(folder))


@pytest.mark.parametrize(
    ("kind", "stock", "given"),
    [
        (PrefixTreeGRPOTrainer, GRPOTrainer, {}),
        pytest.param(
            *(PrefixTreeRLOOTrainer, RLOOTrainer, {"config": RLOOConfig}),
            marks=[pytest.mark.full, pytest.mark.skipif(OLD, reason="TRL 1.16's sees images")],
        ),
    ],
    ids=["grpo", "rloo"],
)
def test_a_run_is_trls_own(
    vision: Path, kind: type, stock: type, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One micro-batch a generation. The vision encoder and deepstack's mergers learn too."""
    seen: list[pt.Images] = []
    score = core.sequence_logprobs

    def scored(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["images"])
        return score(*args, **kwargs)

    monkeypatch.setattr(core, "sequence_logprobs", scored)
    arguments = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, **given}
    ours = trained(kind, vision, **arguments)
    assert ours._is_vlm
    config = ours.model.config
    assert config.text_config._attn_implementation == "prefixtree"
    assert config.vision_config._attn_implementation == "sdpa"
    theirs = trained(stock, vision, **arguments)
    assert_equal_runs(ours, theirs)
    before = start(vision)
    change = {n: float((p - before[n]).abs().max()) for n, p in parameters(ours.model).items()}
    assert max(change.values()) > 1e-3
    assert all(change[n] > 0 for n in change if "visual" in n and "weight" in n)
    # two prompts with four completions each, and as many copies of their images
    assert seen and all(p.num_given == 8 and len(p) == 2 for p in seen)
    ratio = [x["prefixtree/replication_ratio"] for x in ours.state.log_history if "loss" in x]
    assert min(ratio) > 1.5


def test_micro_batches_keep_the_images_of_their_rows(vision: Path) -> None:
    """Rows are shuffled by TRL and put together again, with their images."""
    ours, theirs = (trained(kind, vision) for kind in (PrefixTreeGRPOTrainer, SameOrder))
    assert_equal_runs(ours, theirs)
    ours, own = (
        trained(kind, vision, loss_type="dapo") for kind in (PrefixTreeGRPOTrainer, GRPOTrainer)
    )
    assert_equal_runs(ours, own, wanted=lambda name: name in ("loss", "grad_norm", "reward"))


# of micro-batches that cut groups
@pytest.mark.filterwarnings("ignore:.*micro-batch:UserWarning")
@pytest.mark.parametrize("recompute", [None, "auto"])
def test_trunks_of_a_step_keep_their_images(
    vision: Path, recompute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 4 in micro-batches of 2: a group's image is encoded once for both, by the policy,
    the old policy and the reference. Red where trunks lose the gradients that they get."""
    opened: list[tuple[bool, int]] = []
    kept = kept_windows.kept_trunks

    def counted(*args: Any, **options: Any) -> Any:
        opened.append((torch.is_grad_enabled(), len(options["images"])))
        return kept(*args, **options)

    monkeypatch.setattr(kept_windows, "kept_trunks", counted)
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    options = {"recompute": recompute}
    ours = trained(PrefixTreeGRPOTrainer, vision, options, **cut)
    # two prompts a generation, whose images are distinct; two iterations
    planned = [(True, 2)] if recompute else []
    assert opened == [*planned, (False, 2), (False, 2), (True, 2), (True, 2)]
    assert_equal_runs(ours, trained(SameOrder, vision, **cut))
    if recompute is None:
        lose_keys(monkeypatch)
        wrong = trained(PrefixTreeGRPOTrainer, vision, **cut)
        assert worst_parameter(ours, wrong)[0] > 1e-4


@pytest.mark.filterwarnings("ignore:.*micro-batch:UserWarning")
def test_what_encoders_hold_counts_for_trunks(
    vision: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the graph of a trunk, and of an own token."""
    asked: list[tuple[ImportCost, pt.PrefixForest]] = []
    plan = trunks.plan_trunks

    def planned(forest: pt.PrefixForest, budget: int, cost: ImportCost, *rest: Any) -> Any:
        asked.append((cost, forest))
        return plan(forest, budget, cost, *rest)

    monkeypatch.setattr(trunks, "plan_trunks", planned)
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 1}
    ours = trained(PrefixTreeGRPOTrainer, vision, **cut, gradient_checkpointing=False)
    (cost, forest), model = asked[-1], ours.model
    text = pt.import_cost(model)
    feature = encoder_memory_of(model, model, torch.device("cpu")).feature
    more = cost.graph_bytes - text.graph_bytes
    # of each image its features, distinct and placed; and its pixels
    assert more * forest.num_tokens > 2 * feature
    assert cost.token_bytes == pytest.approx((text.token_bytes or 0) + more)
    assert cost.trunk_weight != text.trunk_weight


@pytest.mark.filterwarnings("ignore:.*micro-batch:UserWarning")
@pytest.mark.parametrize("whose", ["own", "another"])
def test_a_window_that_does_not_fit_is_not_opened(
    vision: Path, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any process, as their plans of trunks and vision encoders say: micro-batches run by
    themselves."""
    asked: list[int] = []
    reduce = Accelerator.reduce

    def too_large(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("of trunks")

    def reduced(self: Any, tensor: torch.Tensor, *rest: Any, **options: Any) -> Any:
        found = reduce(self, tensor, *rest, **options)
        # TRL's own are numbers with a fraction; two decide whether a plan is followed
        if tensor.numel() > 1 or tensor.is_floating_point():
            return found
        asked.append(int(found))
        return found + (whose == "another")

    monkeypatch.setattr(Accelerator, "reduce", reduced)
    if whose == "own":
        monkeypatch.setattr("prefixtree.recompute.trunk_modes.plan_kept", too_large)
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    ours = trained(PrefixTreeGRPOTrainer, vision, {"recompute": "auto"}, **cut)
    # windows without gradients plan nothing
    assert (1 in asked) == (whose == "own") and asked and ours._trunks.window is None
    monkeypatch.undo()
    assert_equal_runs(ours, trained(SameOrder, vision, **cut))


@pytest.mark.filterwarnings("ignore:.*micro-batch:UserWarning")
def test_images_that_change_within_a_step_are_refused(vision: Path) -> None:
    class ChangesImages(PrefixTreeGRPOTrainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            if self._step == 2:
                inputs = {**inputs, "pixel_values": inputs["pixel_values"] + 1}
            return super()._compute_loss(model, inputs)

    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    with pytest.raises(pt.UnsupportedError, match="asks for other rows than the trainer buffered"):
        trained(ChangesImages, vision, **cut)


def test_images_of_other_rows_are_seen(vision: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison turns red where rows get one another's images."""
    of = RowImages.of

    def turned(self: Any, *rows: int) -> Any:
        pixels, grids = of(self, *rows)
        return pixels.flip(0), grids

    arguments = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    theirs = trained(GRPOTrainer, vision, **arguments)
    monkeypatch.setattr(RowImages, "of", turned)
    ours = trained(PrefixTreeGRPOTrainer, vision, **arguments)
    with pytest.raises(AssertionError):
        assert_equal_runs(ours, theirs, tolerance=1e-3)


@pytest.mark.filterwarnings("ignore:the sequences hold")
def test_placeholders_that_were_sampled_are_text(vision: Path) -> None:
    """In rows without images, as TRL scores them."""
    ours, theirs = (made(kind, vision) for kind in (PrefixTreeGRPOTrainer, GRPOTrainer))
    image, video = (getattr(ours.model.config, f"{kind}_token_id") for kind in ("image", "video"))
    ids = torch.tensor([[5, 6, 7, image, image, 8], [5, 6, 7, video, 9, image]])
    found, expected = (
        t._get_per_token_logps_and_entropies(t.model, ids, torch.ones_like(ids), 4)[0]
        for t in (ours, theirs)
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def _first_turned(images_of: Any, inputs: Any) -> list[torch.Tensor]:
    """The rows of an update get one another's images."""
    return [x if i else x.flip(0) for i, x in enumerate(images_of(inputs))]


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "red"])
def test_sft_is_trls_own(vision: Path, wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And red where the rows get one another's images."""
    if wrong:
        wrap(monkeypatch, "images of rows", _first_turned)

    def run(kind: type[SFTTrainer]) -> SFTTrainer:
        trainer = make_sft(
            kind,
            vision,
            model=AutoModelForImageTextToText.from_pretrained(vision),
            options={"processing_class": processor(vision), "train_dataset": captions()},
            max_length=None,
            remove_unused_columns=False,
        )
        trainer.train()
        return trainer

    ours, theirs = run(PrefixTreeSFTTrainer), run(SFTTrainer)
    before = start(vision)
    change = {n: float((p - before[n]).abs().max()) for n, p in parameters(ours.model).items()}
    assert all(change[n] > 0 for n in change if "visual" in n and "weight" in n)
    assert min(ratios(ours)) > 1.2
    if not wrong:
        assert_equal_runs(ours, theirs)
        return
    with pytest.raises(AssertionError):
        assert_equal_runs(ours, theirs, tolerance=1e-3)


@pytest.mark.parametrize("wrong", ["", "images of other rows", "no gradient of the vision encoder"])
def test_dpo_is_trls_own(vision: Path, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its reference's; red where rows get one another's images, or the vision encoder no
    gradient."""
    if wrong == "images of other rows":
        wrap(monkeypatch, "images of rows", _first_turned)
    elif wrong:
        lose_images(monkeypatch)

    def run(kind: type[DPOTrainer]) -> DPOTrainer:
        trainer = make_dpo(
            kind,
            vision,
            model=AutoModelForImageTextToText.from_pretrained(vision),
            options={
                "ref_model": AutoModelForImageTextToText.from_pretrained(vision),
                "processing_class": processor(vision),
                "train_dataset": pairs(),
            },
            max_length=None,
            max_steps=2,
        )
        trainer.train()
        return trainer

    ours, theirs = run(PrefixTreeDPOTrainer), run(DPOTrainer)
    before = start(vision)
    change = {n: float((p - before[n]).abs().max()) for n, p in parameters(theirs.model).items()}
    assert all(change[n] > 0 for n in change if "visual" in n and "weight" in n)
    assert min(ratios(ours)) > 1.5
    if not wrong:
        assert_equal_runs(ours, theirs)
        return
    with pytest.raises(AssertionError):
        assert_equal_runs(ours, theirs, tolerance=1e-3)


def test_what_is_refused(vision: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = made(PrefixTreeGRPOTrainer, vision)
    for name in ("is_deepspeed_enabled", "is_fsdp_enabled"):
        with monkeypatch.context() as patch:
            patch.setattr(ours, name, True)
            with pytest.raises(pt.UnsupportedError, match="DeepSpeed or FSDP is not verified wi"):
                check_images(ours)
    batch = {"input_ids": torch.ones(1, 4).long(), "attention_mask": torch.ones(1, 4).long()}
    with pytest.raises(pt.UnsupportedError, match="has pixel_attention_mask: only images with a g"):
        ours._get_per_token_logps_and_entropies(
            ours.model, **batch, logits_to_keep=2, pixel_attention_mask=torch.ones(1)
        )
    with pytest.raises(pt.UnsupportedError, match="torch_compile=True is not verified with images"):
        made(PrefixTreeGRPOTrainer, vision, torch_compile=True)
