"""The command line: `prefixtree report | verify | demo`.

This module holds the options and their help; each command's work is in its own module, imported
when it runs, so that `--help` and `report` answer without transformers.

Exit codes: 0 ok, 1 a check is red, 2 unusable input or options, 130 interrupted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from prefixtree.cli.rollouts import InputError, Rollouts
from prefixtree.errors import ForestError, UnsupportedError


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Runs a command; what the user can repair is one line and exit code 2."""
        try:
            return super().invoke(ctx)
        except (InputError, ForestError, UnsupportedError) as problem:
            from prefixtree.cli.console import complain

            complain(f"prefixtree: {problem}")
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

_File = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="JSON lines of rollouts, gzipped or not; - is standard input. A line holds token_ids "
        "(or input_ids), or prompt_ids with response_ids (or completion_ids); optional: "
        "loss_mask, turn_ends, id, group.",
        show_default=False,
    ),
]
_PerTurn = Annotated[
    bool,
    typer.Option(
        "--per-turn",
        help="One sequence per assistant turn, as step-wise trainers make them: by turn_ends, or "
        "by the runs of ones in loss_mask.",
    ),
]
_Strict = Annotated[
    bool,
    typer.Option(
        "--strict/--no-strict",
        help="Stop at the first broken line instead of leaving it out and saying so.",
    ),
]
_AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")
]


def _show_version(asked: bool) -> None:
    if asked:
        from prefixtree import __version__

        print(f"prefixtree {__version__}")
        raise typer.Exit()


@app.callback()
def _top(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Compute each shared prefix of a training batch once, exactly.

    See what your rollouts share, then check on your model that nothing changes:

        prefixtree demo
        prefixtree report rollouts.jsonl.gz --per-turn
        prefixtree verify --model path/to/model rollouts.jsonl.gz --limit 16

    Exit codes: 0 ok, 1 a check is red, 2 unusable input or options.
    """


@app.command("report")
def _report(
    file: _File, per_turn: _PerTurn = False, strict: _Strict = False, as_json: _AsJson = False
) -> None:
    """How much a file of rollouts shares, and what its forest looks like.

    The token ratio bounds what sharing can save in the linear layers, the
    attention FLOP ratio what it can save in attention.

        prefixtree report rollouts.jsonl.gz --per-turn
        prefixtree report rollouts.jsonl.gz --json | jq .tokens.ratio
    """
    from prefixtree.cli.console import out, print_json
    from prefixtree.cli.report import measure, show
    from prefixtree.forest import PrefixForest

    rollouts = _read(file, per_turn, strict)
    facts = measure(PrefixForest.from_sequences(rollouts.sequences))
    if as_json:
        left_out = len(rollouts.problems)
        print_json({"file": file, "per_turn": per_turn, "left_out": left_out, **facts})
    else:
        unit = "a sequence per assistant turn" if per_turn else "a sequence per rollout"
        show(facts, out(), f"{rollouts.source}, {unit}")


@app.command("verify")
def _verify(
    file: _File,
    model: Annotated[
        Path,
        typer.Option(
            metavar="DIR|CONFIG.json",
            help="A local folder of weights, or a config.json, for random weights.",
            show_default=False,
        ),
    ],
    per_turn: _PerTurn = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Take the first N sequences (after --per-turn).")
    ] = None,
    tasks: Annotated[
        int | None, typer.Option(min=1, help="Take the rollouts of the first N groups.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(
            help="Of the weights. Below float32 the packed run may err twice as much as the "
            "replicated one, both against float32."
        ),
    ] = "float32",
    device: Annotated[str, typer.Option(help="A torch device: cpu, cuda, cuda:1, mps.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of random weights and of the loss.")] = 0,
    gradient_checkpointing: Annotated[
        bool,
        typer.Option(
            "--gradient-checkpointing", help="Recompute activations in backward, in both runs."
        ),
    ] = False,
    strict: _Strict = False,
    as_json: _AsJson = False,
) -> None:
    """Check on this machine that packing changes nothing for your model.

    Runs the sequences twice from the same weights: each alone with eager
    attention, then all packed. Compares every log-probability, every entropy and
    the gradient of every parameter, and measures time and peak memory.

        prefixtree verify --model path/to/model rollouts.jsonl.gz --limit 16
        prefixtree verify --model config.json rollouts.jsonl --tasks 2 --per-turn

    Exits with 1 when a check is red.
    """
    from prefixtree.cli.console import out, print_json

    rollouts = _read(file, per_turn, strict)
    if tasks is not None:
        rollouts = rollouts.first_groups(tasks)
    if limit is not None:
        rollouts = rollouts.first(limit)

    from prefixtree.cli.verify import Setting, show, verify

    facts = verify(rollouts, Setting(model, dtype, device, seed, gradient_checkpointing))
    if as_json:
        print_json(
            {"file": file, "per_turn": per_turn, "left_out": len(rollouts.problems), **facts}
        )
    else:
        show(facts, out())
    raise typer.Exit(0 if facts["passed"] else 1)


@app.command("demo")
def _demo(
    seed: Annotated[int, typer.Option(help="Of the rollouts and the weights.")] = 7,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the rollouts there, for report and verify."),
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """One policy-gradient update on embedded rollouts, replicated and packed.

    A refund desk with tools, a tiny Qwen3 with random weights, less than a minute
    on two cores. Shows the forest, the same loss and gradients, and what is saved.

        prefixtree demo
        prefixtree demo --save rollouts.jsonl && prefixtree report rollouts.jsonl

    Exits with 1 when the two updates differ.
    """
    from prefixtree.cli.console import out, print_json
    from prefixtree.cli.desk import make_rollouts

    rollouts = make_rollouts(seed)
    if save is not None:
        _write(save, rollouts)

    from prefixtree.cli.demo import show, update

    facts = update(rollouts, seed)
    if as_json:
        print_json(facts)
    else:
        show(facts, rollouts, out())
    raise typer.Exit(0 if facts["passed"] else 1)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    try:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as problem:
        raise InputError(f"{path}: cannot be written: {problem.strerror}") from None


def _read(file: str, per_turn: bool, strict: bool) -> Rollouts:
    from prefixtree.cli.console import Reading, complain_about
    from prefixtree.cli.rollouts import expand_turns, read_rollouts

    with Reading() as reading:
        rollouts = read_rollouts(file, strict=strict, watch=reading.watch)
    if per_turn:
        rollouts = expand_turns(rollouts, strict=strict)
    complain_about(rollouts.problems)
    return rollouts


def main() -> None:
    """The `prefixtree` command."""
    app(prog_name="prefixtree")
