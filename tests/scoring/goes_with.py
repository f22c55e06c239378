"""Writes "What goes with what" of docs/what-fits-where.md from tables of tests.

    python -m tests.scoring.goes_with

Ways of running are columns of the matrix (`tests/scoring/ways.py`): a cell is what it says of the
levels of a row. The other cells name a test, the words of a refusal, or why there is no such thing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.scoring.ways import Absent, Refused, cell

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/what-fits-where.md"
BEGIN, END = "<!-- what goes with what -->", "<!-- /what goes with what -->"


@dataclass(frozen=True)
class Held:
    """A cell that a test holds.

    Attributes:
        test: its file, from `tests/`, and its name.
        words: what the cell says. Default: "yes".
    """

    test: str
    words: str = "yes"


Cell = Held | Refused | Absent

# the levels of ways.AXES["way"] that a column stands for
WAYS = {
    "one forward": ("one forward",),
    "steps": ("steps", "values in steps"),
    "kept trunks": ("kept trunks", "again"),
    "groups": ("groups by parts", "groups by heads"),
    "steps in groups": ("steps in groups", "steps in groups by heads"),
    "values": ("values", "kept values"),
}
USERS = ("sampler", "TRL", "veRL")

_SAMPLER, _TRL, _VERL = "sampling/test_", "integrations/trl/test_", "integrations/verl/test_"
_NO_GRADIENT = Absent("samples have no gradient")

#: name of a row -> levels of the matrix, and the cells of USERS
ROWS: dict[str, tuple[tuple[str, ...], tuple[Cell, Cell, Cell]]] = {
    "LoRA": (
        ("LoRA without the first layer",),
        (
            Held(f"{_SAMPLER}whole_copy.py::test_adapters"),
            Held(f"{_TRL}training.py::test_adapters_with_their_reference"),
            Held(f"{_VERL}engine.py::test_the_reference_is_the_actor_without_its_adapter"),
        ),
    ),
    "QLoRA (bitsandbytes)": (
        ("QLoRA",),
        (
            Held(f"{_SAMPLER}sampler.py::test_weights_of_4_bits"),
            Held(f"{_TRL}training.py::test_an_adapter_beside_weights_of_4_bits"),
            Absent("veRL loads no weights of bitsandbytes"),
        ),
    ),
    "frozen layers": (
        ("frozen layers", "head alone"),
        (
            _NO_GRADIENT,
            Held(f"{_TRL}logprobs.py::test_training_changes_nothing_but_parameters_that_train"),
            Absent("veRL freezes image encoders alone"),
        ),
    ),
    "checkpointing, modes of `recompute`": (
        ("checkpointing", "reentrant checkpointing", "nothing", "all_but_attention", "all"),
        (
            Held(f"{_SAMPLER}stale_keys.py::test_a_model_as_training_has_it"),
            Held(f"{_TRL}training.py::test_layers_recompute_what_is_asked_for"),
            Held(f"{_VERL}engine.py::test_layers_recompute_what_is_set"),
        ),
    ),
    '`recompute="auto"`': (
        ("auto",),
        (
            _NO_GRADIENT,
            Held(f"{_TRL}kept_windows.py::test_auto_recomputes_what_does_not_fit"),
            Held(f"{_VERL}kept_trunks.py::test_auto_recomputes_what_does_not_fit"),
        ),
    ),
    "compiled layers": (
        ("compiled layers",),
        (
            Held(
                f"{_SAMPLER}sampler.py::test_compiled_layers_serve_every_sampler_and_number_of_rows"
            ),
            Held(f"{_TRL}training.py::test_layers_compiled_one_by_one"),
            Held(f"{_VERL}engine.py::test_layers_are_compiled_where_that_is_set"),
        ),
    ),
    "bfloat16 autocast": (
        ("bfloat16 autocast",),
        (
            Held(f"{_SAMPLER}sampler.py::test_calls_of_another_autocast_are_refused"),
            Held(f"{_TRL}training.py::test_mixed_precision"),
            Held(f"{_VERL}engine.py::test_the_model_runs_under_verls_autocast"),
        ),
    ),
    "experts": (
        ("experts",),
        (
            Held(f"{_SAMPLER}families.py::test_equals_generate_and_eager"),
            Held(f"{_TRL}training.py::test_a_mixture_of_experts"),
            Held(f"{_VERL}updates.py::test_one_rank"),
        ),
    ),
    "load-balancing loss": (
        ("router loss",),
        (
            _NO_GRADIENT,
            Held(f"{_TRL}training.py::test_a_mixture_of_experts"),
            Held(f"{_VERL}refusals.py::test_a_load_balancing_loss_that_verl_does_not_read", "no"),
        ),
    ),
    "recorded routes": (
        ("routes",),
        (
            Refused("recorded routes, and sampled tokens would have none"),
            Absent("TRL records none"),
            Held(f"{_VERL}replay.py::test_one_rank"),
        ),
    ),
    "recurrent layers": (
        ("delta rule", "Mamba-2", "convolutions"),
        (
            Held(f"{_SAMPLER}states.py::test_every_token_over_three_turns"),
            Held(f"{_TRL}training.py::test_recurrent_layers_and_indexers"),
            Held(f"{_VERL}hybrids.py::test_one_rank"),
        ),
    ),
    "[indexers](sparse.md)": (
        ("indexers", "blocks that choose"),
        (
            Refused("samplers do not keep an indexer's keys yet"),
            Held(f"{_TRL}training.py::test_recurrent_layers_and_indexers"),
            Held(f"{_VERL}hybrids.py::test_the_transformers_that_verl_asks_for_is_refused", "no"),
        ),
    ),
    "DeepSeek V4's compressed keys": (
        ("compressed keys",),
        (
            Refused("samplers do not keep an indexer's keys yet"),
            Refused('whose keys are compressed | under "prefixtree"'),
            Held(f"{_VERL}hybrids.py::test_the_transformers_that_verl_asks_for_is_refused", "no"),
        ),
    ),
    "images": (
        ("images",),
        (
            Held(
                f"{_SAMPLER}sampler.py::test_placeholders_that_were_sampled_before_are_text", "no"
            ),
            Held(f"{_TRL}images.py::test_a_run_is_trls_own", "yes, no distillation"),
            Held(f"{_VERL}images.py::test_one_rank"),
        ),
    ),
    "entropies, [statistics](losses.md)": (
        ("entropies", "statistics", "entropies and statistics"),
        (
            _NO_GRADIENT,
            Held(f"{_TRL}sample_trainers.py::test_metrics_of_logits"),
            Held(f"{_VERL}losses.py::test_policy_losses"),
        ),
    ),
    "[`measure=`](losses.md)": (
        ("measure",),
        (
            _NO_GRADIENT,
            Held(
                f"{_TRL}distillation.py::test_a_run_on_policy_is_trls_own",
                "[distillation](trl.md#distillation)",
            ),
            Held(
                f"{_VERL}distillation.py::test_top_k",
                "[distillation](verl.md#the-same-numbers-as-verl)",
            ),
        ),
    ),
    "[sampling masks](sampler.md)": (
        ("sampling masks",),
        (
            _NO_GRADIENT,
            Absent("TRL 1.16 asks engines for none"),
            Held(f"{_VERL}sampling_masks.py::test_an_update_is_verls_own_over_masked_logits"),
        ),
    ),
}

#: levels that have no row, in addition to plain ones, ways and events
NO_ROW = {
    *("windows, softcap", "sinks", "latent attention"),
    *("embedding alone", "two vectors", "three of all", "no parameter"),
    *("loss masks", "temperatures", "float64"),
}

_RANKS = "scoring/test_distributed.py::test_two_ranks"
_STEPS = "scoring/test_steps_on_ranks.py::test_gradients_are_those_of_one_forward"
_KEPT = "scoring/test_kept_trunks_on_ranks.py::test_gradients_are_those_of_micro_batches_alone"
_GROUPS = "scoring/test_in_groups.py::test_two_ranks"
_SLOTS = "scoring/test_steps_in_groups.py::test_groups_of_other_numbers_of_steps"
_VALUES = "scoring/test_kept_trunks_on_ranks.py::test_values_are_those_of_micro_batches_alone"
_SHARDED = Refused("the parameters are sharded over ranks")

#: name of a row -> the cells of WAYS without values, and of USERS
WRAPPERS: dict[str, tuple[Cell, ...]] = {
    "DDP": (
        Held(_RANKS),
        Held(_STEPS),
        Held(_KEPT),
        Held(_GROUPS),
        Held(_SLOTS),
        Absent("every rank samples with the module that DDP holds"),
        Held(f"{_TRL}distributed.py::test_two_ranks"),
        Absent("veRL's engines shard"),
    ),
    "FSDP2": (
        Held(_RANKS),
        Held(_STEPS),
        Held(_KEPT),
        Held(_GROUPS),
        Held(_SLOTS),
        Held(f"{_TRL}distributed.py::test_two_ranks", "in TRL"),
        Held(f"{_TRL}distributed.py::test_two_ranks"),
        Held(f"{_VERL}updates.py::test_two_ranks"),
    ),
    "FSDP1": (
        Held(f"{_VERL}updates.py::test_one_rank"),
        Held(_STEPS),
        Refused("FSDP1"),
        Held(_GROUPS),
        Held(_SLOTS),
        _SHARDED,
        Refused("FSDP1 (fsdp_version: "),
        Held(f"{_VERL}updates.py::test_one_rank"),
    ),
    "DeepSpeed": (
        Held(f"{_TRL}deepspeed.py::test_runs_are_trls_own"),
        Refused("DeepSpeed counts one backward per micro-batch, and steps"),
        Refused("DeepSpeed counts one backward per micro-batch, and kept trunks"),
        Refused("DeepSpeed | with group"),
        Refused("DeepSpeed | with group"),
        _SHARDED,
        Held(f"{_TRL}deepspeed.py::test_other_trainers"),
        Absent("veRL has no such engine"),
    ),
    "tensor, expert parallelism": (
        Held("scoring/test_tensor_parallel.py::test_two_ranks"),
        Held(_STEPS),
        Refused("tensor or expert parallel | with kept trunks"),
        Refused("tensor or expert parallel | with group"),
        Refused("tensor or expert parallel | with group"),
        _SHARDED,
        Refused("a parallelism_config with tensor, context or sequence parallelism"),
        Absent("veRL's FSDP engines have none; Megatron's are another page"),
    ),
}


def of_ways(levels: tuple[str, ...], ways: tuple[str, ...]) -> str:
    """The text of a cell of the matrix: "yes", "no", "-", or what of it is not."""
    found = {level: {type(cell(way, level)) for way in ways} for level in levels}
    refused = [level for level, kinds in found.items() if Refused in kinds]
    held = [level for level, kinds in found.items() if type(None) in kinds and level not in refused]
    if len(held) == len(levels):
        return "yes"
    return ", ".join(held) or ("no" if refused else "-")


def text_of(of: Cell) -> str:
    """The text of a cell that is not of the matrix."""
    if isinstance(of, Held):
        return of.words
    return "no" if isinstance(of, Refused) else "-"


def tables() -> str:
    """Both tables, in Markdown."""
    head = ["", *WAYS, *USERS]
    rows = [
        [name, *(of_ways(levels, ways) for ways in WAYS.values()), *map(text_of, users)]
        for name, (levels, users) in ROWS.items()
    ]
    spread = [[name, *map(text_of, cells)] for name, cells in WRAPPERS.items()]
    shown = [head, *rows], [[h for h in head if h != "values"], *spread]
    return "\n\n".join(
        "\n".join(_line(row) for row in (table[0], ["---"] * len(table[0]), *table[1:]))
        for table in shown
    )


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def cells() -> list[Cell]:
    """The cells that are not of the matrix."""
    return [
        *(of for _, users in ROWS.values() for of in users),
        *(of for row in WRAPPERS.values() for of in row),
    ]


def page() -> str:
    """The text of the page, with the tables of now."""
    text = PAGE.read_text()
    between = f"{BEGIN}\n\n{tables()}\n\n{END}"
    return re.sub(f"{BEGIN}.*{END}", lambda _: between, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page())
