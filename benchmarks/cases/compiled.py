"""Do the Triton kernels fit and not spill on GPUs that are not here? Reads machine code.

    python -m benchmarks compiled [--capability 90] [--dims 128x128 ...] [--candidates] [--out FILE]

For each configuration of `prefixtree/kernels/attention/triton/configs.py` (of decoding: for wide
and for narrow items): registers, stack and shared memory of a program, how many programs a
multiprocessor holds, and for the innermost loops over tiles (unmasked first) the instructions a
warp scheduler issues, the cycles its tensor core is busy and the loads from local memory (spills)
per step. `--candidates` adds shapes that were considered. It needs triton with its bundled ptxas
and nvdisasm; no GPU. Not with TRITON_INTERPRET set.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.lib.machine_code import SHARED, Code, read
from benchmarks.lib.runs import described, write
from benchmarks.lib.tables import Column, Parts, Table, show
from prefixtree.kernels import indexer_kernels
from prefixtree.kernels.attention.triton import chosen as tile_bits
from prefixtree.kernels.attention.triton.backward import (
    dkdv_kernel,
    dq_kernel,
    prepare_kernel,
    reduce_kernel,
)
from prefixtree.kernels.attention.triton.configs import Config, KernelConfigs, choose, choose_decode
from prefixtree.kernels.attention.triton.forward import forward_kernel
from prefixtree.kernels.decoding.kernels import merge_kernel, partial_kernel, write_kernel
from prefixtree.kernels.latents import kernels as latents
from prefixtree.kernels.latents import launch as gathered
from prefixtree.kernels.lm_head import kernels as lm_head
from prefixtree.kernels.recurrence import decode_kernels

INT32 = {
    "POSITION", "Q_TILES", "Q_ORDER", "K_TILES", "Q_PTR", "Q_SPLIT", "Q_RUNS", "PARTIAL_PTR",
    "PARTIAL", "PIECES", "K_RUNS", "SLOTS", "K_SPANS", "CHOSEN", "RUN_PAIRS", "CHOSEN_TILES",
}  # fmt: skip
FLOAT32 = {"LSE", "ROW_VALUES", "PARTIALS", "DLSE", "DSINKS"}
KERNELS = {"forward": forward_kernel, "keys": dkdv_kernel, "queries": dq_kernel}
FEATURES = [f"HAS_{name}" for name in ("WINDOW", "SOFTCAP", "SINKS", "SHARE", "DLSE", "CHOSEN")]
# WIDE: dK and dV in float32
FEATURES += ["SUBSET", "DETERMINISTIC", "WIDE"]
DIMS = ("64x64", "128x128", "192x128", "256x256")
# Kernels without a choice of tiles: code for 8.0 is that for 8.6 and 8.9, where it has to fit too
LEAST = {80: 86}


def statics(
    config: Config,
    choice: KernelConfigs,
    dims: tuple[int, int],
    heads: tuple[int, int],
    **flags: Any,
) -> dict[str, Any]:
    """Compile-time arguments of any of the kernels, as `launch` passes them."""
    values: dict[str, Any] = {
        "GROUP": heads[0] // heads[1],
        "HEADS": choice.heads,
        "KV_HEADS": heads[1],
        "D": dims[0],
        "DV": dims[1],
        "D_PADDED": max(16, triton.next_power_of_2(dims[0])),
        "D_WIDTH": choice.width(dims[0]),
        "DV_PADDED": max(16, triton.next_power_of_2(dims[1])),
        "ROWS": config.rows,
        "KEYS": config.keys,
        "TOKENS": config.rows // choice.heads,
        "TOKENS_PADDED": triton.next_power_of_2(-(-config.rows // choice.heads)),
        "TMA": choice.tma,
        "Q_TMA": choice.tma and config.shared < 1,
        "DOUT_TMA": choice.tma and config.shared < 2,
        "ROWS_TMA": choice.tma,
    }
    together = {"WITH_DK": True, "WITH_DV": True}
    return values | together | dict.fromkeys(FEATURES, False) | flags


def compiled(
    kernel: Any, values: dict[str, Any], config: Config, capability: int, dtype: str
) -> Any:
    """The kernel compiled for `sm_<capability>`."""
    signature = {name: _type(kernel, name, values, dtype) for name in kernel.arg_names}
    aligned = [
        name
        for name, kind in signature.items()
        if kind.startswith("*") or name.endswith(("_token", "_head"))
    ]
    options: dict[str, Any] = {"num_warps": config.warps, "num_stages": config.stages}
    if config.registers:
        options["maxnreg"] = config.registers
    return _built(kernel, signature, values, aligned, capability, options)


def _built(
    kernel: Any,
    signature: dict[str, str],
    values: dict[str, Any],
    aligned: Iterable[str],
    capability: int,
    options: dict[str, Any],
) -> Any:
    """From types by name, compile-time values, what is a multiple of 16, and launch options."""
    at = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    fixed = {at[name]: value for name, value in values.items() if name in at}
    divisible: dict[Any, Any] = {at[name]: [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constexprs=fixed, attrs=divisible)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _type(kernel: Any, name: str, values: dict[str, Any], dtype: str) -> str:
    if name in values:
        return "constexpr"
    described = values["TMA"] and kernel in KERNELS.values()
    rows = values["ROWS_TMA"] and kernel in KERNELS.values()
    width = values["DV_PADDED" if name in ("V", "DOUT") else "D_WIDTH"]
    if described and name in ("K", "V"):
        return f"tensordesc<{dtype}{[values['KEYS'], width]}>"
    if described and name in ("Q", "DOUT") and (kernel is dkdv_kernel or values[f"{name}_TMA"]):
        return f"tensordesc<{dtype}{[values['TOKENS'], values['HEADS'], width]}>"
    if described and name == "K_SPANS":
        return f"tensordesc<i32{[values['KEYS']]}>"
    if rows and name == "ROW_VALUES":
        return f"tensordesc<fp32{[values['ROWS']]}>"
    if name in INT32:
        return "*i32"
    if name in FLOAT32 or (values["WIDE"] and name in ("DK", "DV_OUT")):
        return "*fp32"
    if name.isupper():
        return f"*{dtype}"
    return "fp32" if name in ("inner", "outer", "scale") else "i32"


def launched(found: Iterable[Config]) -> Iterator[tuple[Config, dict[str, bool]]]:
    """Each configuration with the flags of each launch: dK and dV may have separate ones."""
    for config in found:
        parts = ({"WITH_DV": False}, {"WITH_DK": False}) if config.apart else ({},)
        for part in parts:
            yield config, part


def _helpers(capability: int, dtype: str, quick: bool) -> None:
    """Compiles the small kernels, every feature off and on; of 8.6 and 8.9 what 8.0 has not.

    quick: of kernels without products half of the cases for 8.0 and the other half for 9.0, drawn
    by parity: any two of a kernel, its features, its variant and a generation meet in one case.
    """
    config = Config(64, 64, 4, 2)
    choice = KernelConfigs(False, 4, *[(config, config)] * 3)

    def asked(*case: int) -> bool:
        return not quick or (sum(case) + (capability >= 90)) % 2 == 0

    for on in (False, True):
        _index_scores(32 if on else 64, capability, dtype)
        if capability in (86, 89):
            continue
        values = statics(config, choice, (128, 128), (32, 8), **dict.fromkeys(FEATURES, on))
        for i, kernel in enumerate((prepare_kernel, reduce_kernel)):
            # outside a tile, HEADS and ROWS mean what they mean to `launch`
            if asked(on, i):
                compiled(kernel, values | {"ROWS": 32}, config, capability, dtype)
        for i, kernel in enumerate((lm_head.score_kernel, lm_head.gradient_kernel)):
            for j, divergence in enumerate(("", "forward", "reverse", "between")):
                if asked(on, i, j):
                    _head(kernel, on, divergence, capability, dtype)
        fixed = values | {"BLOCK": 16, "HEADS": 32}
        fixed |= dict.fromkeys(("KEY", "VALUE", "KEY_PADDED", "VALUE_PADDED"), 1024)
        for i, kernel in enumerate((merge_kernel, write_kernel)):
            known = {name: value for name, value in fixed.items() if name in kernel.arg_names}
            if asked(on, i):
                _decode(kernel, known, config, capability, dtype)
        for delta, dims in ((True, (128, 128)), (False, (256, 64))):
            if asked(on, delta):
                _recurrent(on, delta, dims, capability, dtype)
        _choice(on, capability, asked)
    if capability == 90:
        # of 64 heads the number of blocks is another, and nothing else
        for heads in (128,) if quick else (128, 64):
            _gathered(heads, dtype)


def _gathered(heads: int, dtype: str) -> None:
    """The kernels of kernels/latents/kernels.py for latents of 512 and 64 columns: what is in
    their loops must not spill, but for a little in the backward."""
    values = {"HEADS": heads, "R": 512, "P": 64, "R_PADDED": 512, "P_PADDED": 64}
    values |= {"ROWS": gathered.ROWS, "WIDTH": gathered.WIDTH}
    types = dict.fromkeys(("INDEX", "COUNT"), "*i32") | {"scale": "fp32"}
    types |= dict.fromkeys(("LSE", "DELTA", "DLATENTS"), "*fp32")
    launched = (
        (latents.forward_kernel, gathered.FORWARD),
        (latents.backward_kernel, gathered.BACKWARD),
    )
    for kernel, (keys, stages) in launched:
        fixed = {
            k: v
            for k, v in (values | {"KEYS": keys, "STAGES": stages}).items()
            if k in kernel.arg_names
        }
        given = types | dict.fromkeys(fixed, "constexpr")
        signature = {
            name: given.get(name, f"*{dtype}" if name.isupper() else "i32")
            for name in kernel.arg_names
        }
        aligned = [x for x, kind in signature.items() if kind[0] == "*" or "rope_" in x]
        options = {"num_warps": gathered.WARPS, "num_stages": stages}
        built = _built(kernel, signature, fixed, aligned, 90, options)
        code = read(built, gathered.WARPS, 90)
        body = built.asm["ttgir"].split("scf.for")[1]
        if stages > 1 and body.index("async_copy_global") > body.index("warp_group_dot"):
            raise SystemExit(f"{kernel.__name__} copies its next keys behind its products")
        spilt = max(loop.spills / loop.issued for loop in code.loops)
        # a product of 64 rows that each warpgroup computes whole has twice the instructions
        products = code.loops[0].products
        if code.programs < 1 or code.overwritten or spilt > 0.02 or products > 86:
            raise SystemExit(f"{kernel.__name__} {heads} heads: {code}")


def _recurrent(
    is_on: bool, delta: bool, dims: tuple[int, int], capability: int, dtype: str
) -> None:
    """The kernels of kernels/recurrence/decode_kernels.py, which must not spill."""
    sizes = decode_kernels.rule_sizes(*dims)
    flags = {"PER_CHANNEL": is_on, "DELTA": delta, "L2NORM": is_on}
    rule = {"H": 32, "GROUP": 2 if is_on else 1, **flags, **sizes}
    conv = {"W": 4, "SILU": is_on, "COLUMNS": decode_kernels.COLUMNS, "num_warps": 2}
    kernels = (decode_kernels.rule_step_kernel, rule), (decode_kernels.conv_step_kernel, conv)
    for kernel, fixed in kernels:
        warps = fixed.pop("num_warps")
        types = dict.fromkeys(("SOURCE", "TARGET"), "*i64") | {"LIVE": "*u8", "scale": "fp32"}
        types |= {"STATES": "*fp32", "D": "i32"} | dict.fromkeys(fixed, "constexpr")
        signature = {
            name: types.get(name, f"*{dtype}" if name.isupper() else "i32")
            for name in kernel.arg_names
        }
        aligned = [x for x, kind in signature.items() if kind != "constexpr" and x != "scale"]
        built = _built(kernel, signature, fixed, aligned, capability, {"num_warps": warps})
        code = read(built, warps, LEAST.get(capability, capability), False)
        if code.stack > 16 or code.programs < 4:
            raise SystemExit(f"{kernel.__name__} {dims} {flags}: {code}")


def _index_scores(heads: int, capability: int, dtype: str) -> None:
    """The kernel of kernels/indexer_kernels.py, as that launches it; it must not spill."""
    values = {"HEADS": heads, "HEADS_PADDED": heads, "D": 128, "D_PADDED": 128}
    values |= {"TOKENS": indexer_kernels.tile_tokens(heads), "KEYS": indexer_kernels.KEYS}
    types = {"Q": f"*{dtype}", "K": f"*{dtype}", "WEIGHTS": "*fp32", "SCORES": "*fp32"}
    types |= dict.fromkeys(("first", "first_tile", "width"), "i32") | {"scale": "fp32"}
    types |= dict.fromkeys(values, "constexpr")
    kernel, warps = indexer_kernels.scores_kernel, indexer_kernels.WARPS
    signature = {name: types.get(name, "*i32") for name in kernel.arg_names}
    aligned = [name for name, kind in signature.items() if kind[0] == "*"]
    stages = indexer_kernels.stages((capability // 10, capability % 10))
    launched = {"num_warps": warps, "num_stages": stages}
    built = _built(kernel, signature, values, aligned, capability, launched)
    code = read(built, warps, capability, False)
    if code.stack > 16 or code.programs < 1:
        raise SystemExit(f"{kernel.__name__} {heads} heads: {code}")


def _choice(is_on: bool, capability: int, asked: Callable[..., bool]) -> None:
    """The kernels of kernels/indexer_kernels.py and attention/triton/chosen.py: they must not
    spill, the selection on long paths but for a little beside its counts."""
    launched: list[tuple[Any, ...]] = [
        (
            kernel,
            {"HAS_WINDOW": is_on, "TOKENS": 128, "KEYS": keys},
            tile_bits.warps_of(128, keys),
            {},
        )
        for i, kernel in enumerate((tile_bits.by_query_kernel, tile_bits.by_key_kernel))
        for keys in (64, 128)
        if asked(is_on, i, keys == 128)
    ]
    limit = {"maxnreg": indexer_kernels.REGISTERS}
    for i, (size, warps) in enumerate(list(indexer_kernels.SIZES.items())[-1 if is_on else 0 :]):
        if not (is_on or asked(i)):
            continue
        values = {"SIZE": size, "IS_WHOLE": not is_on}
        launched.append((indexer_kernels.best_keys_kernel, values, warps, limit))
    for kernel, values, warps, options in launched:
        types = {"SCORES": "*fp32"} | dict.fromkeys(values, "constexpr")
        signature = {
            name: types.get(name, "*i32" if name.isupper() else "i32") for name in kernel.arg_names
        }
        aligned = [name for name, kind in signature.items() if kind[0] == "*"]
        options = {"num_warps": warps} | options
        built = _built(kernel, signature, values, aligned, capability, options)
        code = read(built, warps, LEAST.get(capability, capability), False)
        if code.stack > (96 if is_on else 16) or code.programs < 1:
            raise SystemExit(f"{kernel.__name__} {values}: {code}")


def _head(kernel: Any, is_on: bool, divergence: str, capability: int, dtype: str) -> None:
    """A kernel of kernels/lm_head/kernels.py, as that launches it, with its features or without; it
    must not spill."""
    flags = dict.fromkeys(("SOFTCAP", "ENTROPY", "TEACHER_SOFTCAP"), is_on)
    values: dict[str, Any] = flags | {"DIVERGENCE": divergence, "BLOCK": lm_head.BLOCK}
    if not divergence:
        values |= dict.fromkeys(("Y", "KEPT", "VALUE", "VALUE_GRAD"))
    types = dict.fromkeys(("X", "INTO", "Y"), f"*{dtype}") | {"TARGET": "*i64", "vocabulary": "i32"}
    types |= dict.fromkeys(values, "constexpr")
    signature = {
        name: types.get(name, "*fp32" if name.isupper() else "fp32") for name in kernel.arg_names
    }
    names = ("X", "INTO", "Y", "KEPT", "vocabulary")
    aligned = [x for x in names if signature.get(x, "constexpr") != "constexpr"]
    warps = lm_head.WARPS
    built = _built(kernel, signature, values, aligned, capability, {"num_warps": warps})
    code = read(built, warps, LEAST.get(capability, capability), False)
    if code.stack > 16 or code.programs < 1:
        raise SystemExit(f"{kernel.__name__} {values}: {code}")


def _decode(
    kernel: Any, values: dict[str, Any], config: Config, capability: int, dtype: str
) -> Any:
    """A kernel of kernels/decoding/kernels.py, as its launch passes arguments."""
    tables = ("ITEMS", "PIECES", "TAILS", "WRITTEN", "SLOT_PTR", "SLOTS")
    types = dict.fromkeys(tables, "*i32") | dict.fromkeys(("PART", "LSE"), "*fp32")
    types |= {"LIVE": "*u8", "inner": "fp32", "outer": "fp32"} | dict.fromkeys(values, "constexpr")
    signature = {
        name: types.get(name, f"*{dtype}" if name.isupper() else "i32") for name in kernel.arg_names
    }
    aligned = [x for x, kind in signature.items() if kind[0] == "*"]
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return _built(kernel, signature, values, aligned, capability, options)


def decoded(
    capability: int, dims: tuple[int, int], heads: tuple[int, int], dtype: str, features: bool
) -> Iterator[tuple[str, Config, Any]]:
    """Names, configurations and machine code of decoding."""
    group, padded = heads[0] // heads[1], [max(16, triton.next_power_of_2(x)) for x in dims]
    common: dict[str, Any] = {"D": dims[0], "DV": dims[1]}
    common |= {"D_PADDED": padded[0], "DV_PADDED": padded[1], "KV_HEADS": heads[1]}
    flags = dict.fromkeys(("HAS_WINDOW", "HAS_SOFTCAP"), features)
    chosen = choose_decode((capability // 10, capability % 10), *padded, 2)
    for name, config in zip(("decode wide", "decode narrow"), chosen, strict=True):
        values = common | flags | {"GROUP": group, "KEYS": config.keys, "ROWS": config.rows}
        yield name, config, _decode(partial_kernel, values, config, capability, dtype)


CANDIDATES = {
    "forward": [(64, 64, 4, 2, 0), (64, 64, 4, 3, 0), (64, 128, 4, 2, 0), (128, 64, 8, 2, 0),
                (128, 128, 8, 2, 0), (128, 64, 4, 2, 0)],
    "keys": [(64, 64, 4, 2, 0), (32, 64, 4, 2, 0), (64, 128, 8, 2, 0), (128, 64, 8, 2, 0),
             (32, 64, 8, 2, 0), (64, 64, 8, 2, 0)],
    "queries": [(64, 64, 4, 2, 0), (64, 64, 4, 2, 168), (64, 128, 4, 2, 0), (128, 64, 8, 2, 0),
                (128, 128, 8, 2, 0), (64, 64, 8, 2, 0)],
}  # fmt: skip


def tables(data: dict[str, Any]) -> Parts:
    """Figures from the machine code of the kernels; the chosen configuration is in bold."""

    def shape(row: dict[str, Any]) -> str:
        c = row["config"]
        limit = f", {c['registers']} registers at most" if c["registers"] else ""
        return f"{c['rows']} x {c['keys']}, {c['warps']} warps, {c['stages']} stages{limit}"

    def loop(at: int) -> Callable[[dict[str, Any]], str]:
        def cell(row: dict[str, Any]) -> str:
            steps = [f"{x['issued']} / {x['tensor']}, {x['spills']}" for x in row["loops"]]
            return steps[at] if at < len(steps) else ""

        return cell

    yield (
        f"sm_{data['capability']}, triton {data['triton']}, {data['dtype']}, "
        f"{data['heads'][0]} / {data['heads'][1]} heads"
    )
    yield Table(
        [
            Column("kernel", lambda r: f"**{r['kernel']}**" if r["chosen"] else r["kernel"]),
            Column("D / Dv", lambda row: row["dims"].replace("x", " / ")),
            Column("rows x keys", shape),
            Column("registers", lambda row: str(row["registers"])),
            Column("stack", lambda row: str(row["stack"]), is_detail=True),
            Column("shared KiB", lambda row: f"{row['shared'] / 1024:.0f}"),
            Column("programs", lambda row: str(row["programs"])),
            Column("full tile", loop(0)),
            Column("partial tile", loop(1)),
        ],
        # of what was not chosen, the main head dim tells enough
        [row for row in data["rows"] if row["chosen"] or row["dims"] == "128x128"],
    )


def chosen(data: dict[str, Any]) -> Parts:
    """The rows of what is shipped, for the page."""
    return tables(data | {"rows": [row for row in data["rows"] if row["chosen"]]})


def _row(name: str, dims: str, is_chosen: bool, config: Config, code: Code) -> dict[str, Any]:
    about = {"kernel": name, "dims": dims, "chosen": is_chosen, "config": vars(config)}
    return about | vars(code) | {"loops": [vars(x) for x in code.loops]}


def _wrong(row: dict[str, Any], features: bool) -> list[str]:
    """Why a chosen configuration must not be shipped."""
    where, out = f"{row['kernel']} {row['dims']}", []
    if row["overwritten"]:
        out.append(
            f"{where}: {row['overwritten']} registers of a product's operand are overwritten"
        )
    if row["programs"] == 0:
        out.append(f"{where}: {row['shared']} bytes of shared memory do not fit")
    if not features and any(x["spills"] * 12 > x["issued"] for x in row["loops"][:1]):
        out.append(f"{where}: spills inside the unmasked loop")
    out += [
        f"{where}: {x['waits']} waits for {x['products']} products of a step"
        for x in row["loops"]
        if x["waits"] * 3 > x["products"] > 0
    ]
    return out


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = described(__doc__)
    add = parser.add_argument
    add("--capability", type=int, default=90, choices=list(SHARED))
    add("--dims", nargs="+", default=list(DIMS), metavar="DxDv", help="head dims, as 128x128")
    add("--heads", default="32x8", help="query and kv heads")
    add("--dtype", default="bf16")
    add("--candidates", action="store_true", help="also shapes that were considered")
    add("--features", action="store_true", help="every feature on, and no limit on spills")
    add("--chosen", action="store_true", help="attention to chosen keys, nothing else")
    add(
        "--quick",
        action="store_true",
        help="what this finds wrong, by fewer small kernels and loops",
    )
    add("--out", type=Path, help="JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a configuration of configs.py does not fit, or if more than 8 % of its unmasked loop is
    spills."""
    options = parse(arguments)
    capability, dtype, features = options.capability, options.dtype, options.features
    h, hk = map(int, options.heads.split("x"))
    with_loops = None if options.quick else True
    rows, bad = [], []
    # whose features are on and off by themselves
    if not (options.chosen or features):
        _helpers(capability, dtype, options.quick)
    for pair in options.dims:
        d, dv = map(int, pair.split("x"))
        wide = [max(16, triton.next_power_of_2(x)) for x in (d, dv)]
        is_chosen = options.chosen or features
        at = capability // 10, capability % 10
        choice = choose(at, *wide, h // hk, True)
        for name, kernel in KERNELS.items():
            chosen = list(dict.fromkeys(getattr(choice, name)))
            tried = CANDIDATES[name] if options.candidates else []
            extra = [replace(chosen[0], rows=r, keys=k, warps=w, stages=s, registers=g)
                     for r, k, w, s, g in tried]  # fmt: skip
            for config, part in launched(dict.fromkeys([*chosen, *extra])):
                flags = dict.fromkeys(FEATURES, features) | {"HAS_CHOSEN": is_chosen} | part
                values = statics(config, choice, (d, dv), (h, hk), **flags)
                binary = compiled(kernel, values, config, capability, dtype)
                code = read(binary, config.warps, capability, with_loops)
                missing = "".join(f" without {x[-2:]}" for x in part)
                row = _row(name + missing, pair, config in chosen, config, code)
                rows.append(row)
                if config in chosen:
                    bad += _wrong(row, features)
        # on 8.x 64 / 64 has the configuration of 128 / 128; 8.6 those of 8.0 in less shared memory,
        # of which 256 / 256 takes most
        repeated = capability < 90 and max(wide) < (128 if capability == 80 else 256)
        if options.chosen or (options.quick and repeated):
            continue
        for name, config, binary in decoded(capability, (d, dv), (h, hk), dtype, features):
            code = read(binary, config.warps, capability, with_loops)
            row = _row(name, pair, True, config, code)
            rows.append(row)
            bad += _wrong(row, features)
    record = {"triton": triton.__version__, "capability": capability, "dtype": dtype,
              "heads": [h, hk], "rows": rows}  # fmt: skip
    show(tables(record))
    write(options.out, record)
    for line in bad:
        print(line)
    return 1 if bad else 0
