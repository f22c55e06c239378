"""The tiles of each kernel: a frozen table, read by the builder of tables and by the launch.

`choose` is a pure function of (capability, head dims, GQA group). For each kernel it gives one
configuration for forests of long nodes and one for short nodes, told apart by the share of partial
tiles. Nothing is tuned at run time.

Comments name the source of the entries. "Compiled" means: registers, spills and instructions of the
inner loop read off the machine code for sm_90 (benchmarks/cases/compiled.py; triton 3.6, bf16, no
feature flags); benchmarks/results.md has the table. "Prototype" means measured on one H200 with the
project's first pointer-load prototype.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from prefixtree.kernels.decoding.work import NARROW, WIDE
from prefixtree.packing.block_tables import TileShape
from prefixtree.packing.host_mask import HostMask

# the grid on which the share of partial tiles is counted, and the share above which a forest has
# short nodes (caterpillar 24 has 0.145, 1,024 nodes of 256 under 256 have 0.286)
PROBE = TileShape(16, 128)
SHORT_NODES = 0.2


@dataclass(frozen=True)
class Config:
    """The launch of one kernel."""

    # rows of a query tile: query tokens x heads of a block
    rows: int
    # keys of a key tile
    keys: int
    warps: int
    stages: int
    # most registers per thread, 0 for the compiler's choice
    registers: int = 0
    # whether key tiles start at node borders where that saves work
    cut: bool = True
    # whether dK and dV get a launch each, as registers do not hold both sums
    apart: bool = False
    # how many of q and dout are first operands in shared memory, not registers
    shared: int = 0


Pair = tuple[Config, Config]


@dataclass(frozen=True)
class KernelConfigs:
    """Configurations of the three kernels (out; dK and dV; dQ), each for (long, short) nodes."""

    # tensor descriptors (Hopper's copy engine) in place of pointers
    tma: bool
    # query heads of one kv head per query tile; a larger group is taken in blocks
    heads: int
    forward: Pair
    keys: Pair
    queries: Pair
    # columns of q and k taken at once, to save padding; 0 to take them whole
    piece: int = 0

    def width(self, dim: int) -> int:
        """Columns of a head dim of q and k that the kernels take at a time."""
        in_pieces = -(-dim // self.piece) * self.piece if self.piece else padded(dim)
        return self.piece if in_pieces < padded(dim) else padded(dim)

    def of(self, mask: HostMask, window: int) -> tuple[Config, Config, Config]:
        """Gives the configurations (forward, keys, queries) for one forest."""
        index = 0
        if not self._uniform:
            index = int(mask.partial_share(PROBE, window) > SHORT_NODES)
        return self.forward[index], self.keys[index], self.queries[index]

    @cached_property
    def _uniform(self) -> bool:
        return all(long == short for long, short in (self.forward, self.keys, self.queries))


def padded(dim: int) -> int:
    """The power of two that holds a head dim; a matrix product takes at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def _both(config: Config) -> Pair:
    return config, config


# on Hopper 192 is three pieces, not 256 (compiled for sm_80, dK and dV would spill in pieces)
_PIECE = 64

# Hopper, by padded head dims (D, Dv). Default: measured on one H200 with benchmarks/cases/tune.py;
# ms are of one kernel, 32 / 8 heads, bf16 (benchmarks/notebook.md)
_HOPPER: dict[tuple[int, int], tuple[Pair, Pair, Pair]] = {
    # caterpillar 24, 32 / 4 heads: forward 5.1 (5.4 without a limit of registers, 5.7 for
    # 128 x 64); 32 / 8: keys 10.1 (12.4 with 2 stages), queries 6.8 (7.5 with 2)
    (64, 64): (
        _both(Config(64, 64, 4, 3, registers=128)),
        _both(Config(64, 64, 4, 3, registers=168)),
        _both(Config(64, 64, 4, 3, registers=168)),
    ),
    # forward: two warpgroups over 128 keys (airline turns 20.6, against 22.1 for 64 x 64;
    # caterpillar 24: 10.7 and 10.5); on short nodes one over 32, of which a multiprocessor holds
    # three programs (256 under 256: 4.7, against 6.5). Keys: two warpgroups over 128 keys,
    # everywhere (documents 16.8, against 19.2 for one over 64). Queries: a third stage (caterpillar
    # 24: 11.7, against 13.6).
    (128, 128): (
        (Config(128, 128, 8, 3), Config(64, 32, 4, 3)),
        _both(Config(64, 128, 8, 3)),
        _both(Config(64, 64, 4, 3)),
    ),
    # queries in shared memory: in registers their products would wait for one another. At
    # (192, 128), 16 / 16 heads, caterpillar 24, on an H100: forward 7.3, keys 13.8, queries 8.9
    # (14.4 in registers and with 192 padded to 256)
    (256, 128): (
        _both(Config(128, 64, 8, 3)),
        _both(Config(32, 128, 8, 3)),
        _both(Config(128, 64, 8, 3, shared=1)),
    ),
    # caterpillar 24: keys 30.7 + 20.4 (together 66.8 for 32 x 64, the most that does not spill).
    # With 16 / 4 heads on an H100: forward 10.1 (11.7 with queries in registers), queries 13.1
    # (15.2 with 2 stages, 18.7 with operands in registers)
    (256, 256): (
        _both(Config(128, 64, 8, 2, shared=1)),
        _both(Config(32, 128, 8, 3, apart=True)),
        _both(Config(128, 32, 8, 3, shared=2)),
    ),
}

# pointers on Hopper, for layouts that descriptors do not serve: measured on caterpillar 24 (tune.py
# --pointers); forward, keys, queries at D 64: 6.7, 10.3, 7.2; at D 128: 12.7 (with the tiles of
# short nodes), 21.0, 15.8; at D 256: 26.0, 69.4, 43.4. Long nodes at D 128 forward: prototype.
_HOPPER_POINTERS: dict[int, tuple[Pair, Pair, Pair]] = {
    64: (
        _both(Config(64, 64, 4, 3)),
        _both(Config(64, 64, 4, 3)),
        _both(Config(64, 32, 4, 3)),
    ),
    128: (
        (Config(128, 64, 8, 3), Config(128, 64, 4, 2)),
        _both(Config(32, 64, 4, 3)),
        _both(Config(128, 64, 8, 3)),
    ),
    256: (
        _both(Config(128, 64, 8, 2)),
        _both(Config(32, 64, 8, 3)),
        _both(Config(128, 32, 8, 2)),
    ),
}
# Ampere with large shared memory, and data center Blackwell; never run there. Compiled for sm_80:
# at D 128 64 x 64 spills for dK and dV, so 32 rows; at D 256 the tallest tiles that do not spill.
_LARGE: dict[int, tuple[Pair, Pair, Pair]] = {
    64: (
        (Config(128, 64, 8, 3), Config(64, 64, 4, 3)),
        _both(Config(32, 64, 4, 2)),
        _both(Config(64, 64, 4, 2)),
    ),
    128: (
        (Config(128, 64, 8, 3), Config(64, 64, 4, 3)),
        _both(Config(32, 64, 4, 3)),
        (Config(128, 64, 8, 2), Config(64, 64, 4, 2)),
    ),
    256: (
        _both(Config(64, 64, 8, 2)),
        _both(Config(32, 64, 8, 3)),
        _both(Config(64, 64, 8, 2)),
    ),
}
# tiles that 99 KiB of shared memory per program allow (Ada, consumer Ampere and Blackwell) and, one
# stage fewer, AMD's 64 KiB. Not measured.
_SMALL: dict[int, tuple[Pair, Pair, Pair]] = {
    64: (
        _both(Config(64, 64, 4, 2)),
        _both(Config(32, 64, 4, 2)),
        _both(Config(64, 64, 4, 2)),
    ),
    128: (
        _both(Config(64, 32, 4, 2)),
        _both(Config(32, 32, 4, 2)),
        _both(Config(64, 32, 4, 2)),
    ),
    256: (
        _both(Config(32, 32, 4, 1)),
        _both(Config(16, 32, 8, 1)),
        _both(Config(32, 32, 8, 1)),
    ),
}


@cache
def choose(
    capability: tuple[int, int],
    d: int,
    dv: int,
    group: int,
    tma: bool,
    cuda: bool = True,
) -> KernelConfigs:
    """Chooses the configurations for a GPU (AMD's is not `cuda`) and group query heads per kv head.

    d and dv are padded to powers of two, at most 256; tma says whether the inputs' layouts suit
    tensor descriptors.
    """
    tma = tma and cuda and capability[0] == 9
    heads = heads_of_tile(group, tma)
    wide = max(d, dv, 64)
    if tma:
        key = (wide, max(dv, 128)) if wide == 256 else (wide, wide)
        return KernelConfigs(True, heads, *_HOPPER[key], piece=_PIECE)
    if cuda and capability[0] == 9:
        return KernelConfigs(False, heads, *_HOPPER_POINTERS[wide], piece=_PIECE)
    # compute capability 8.0 and 10.x have 160 KiB and more of shared memory per program
    large = cuda and capability in ((8, 0), (8, 7), (10, 0), (10, 3))
    return KernelConfigs(False, heads, *(_LARGE if large else _SMALL)[wide])


@cache
def choose_decode(
    capability: tuple[int, int], d: int, dv: int, itemsize: int
) -> tuple[Config, Config]:
    """Chooses decoding's configurations, for (wide, narrow) items; d, dv padded, at most 256."""
    # wide: three programs per multiprocessor (D 128, sm_90), where 64 keys leave room for two
    # (H200, 16/8 heads: 634 us for 666 on agent rollouts, 101 for 117 on 8 prompts of 2K). Narrow:
    # a program of one warp ends soon, and many wait at the same time (891 for 1,023 with 64 keys
    # and 4 warps, 114 for 123)
    stages = 3 if capability in ((9, 0), (10, 0), (10, 3)) else 2
    if max(d, dv) * itemsize <= 256:
        return Config(WIDE, 32, 4, stages), Config(NARROW, 16, 1, 3)
    # head dims above 128, and float32, whose products spill even so
    keys = 32 if itemsize < 4 else 16
    return Config(WIDE, keys, 8, 2), Config(NARROW, keys, 4, 2)


def heads_of_tile(group: int, tma: bool) -> int:
    """Counts the query heads of a group that share a tile; the count divides the group."""
    # descriptors have boxes with powers of two as sides: the largest such divisor up to 16
    if tma:
        return min(group & -group, 16)
    return max(n for n in range(1, 9) if group % n == 0)


def piece_tiles(visible_pairs: int, tile_pairs: int, kv_heads: int, processors: int) -> int:
    """Counts the query tiles after which a key tile's run is cut: a power of two, at least 32."""
    # between 1/16 and 1/32 of the work of a program slot (two slots per multiprocessor), so that
    # the last piece, started longest first, leaves little idle. So at most 64 pieces per
    # multiprocessor belong to cut tiles (all kv heads together), which bounds the float32 sums by
    # 64 x processors x keys x (D + Dv) x 4 bytes, 0.5 GiB on an H200 at D 128
    share = visible_pairs * kv_heads / (tile_pairs * 2 * processors * 16)
    return max(1 << max(int(share), 1).bit_length() - 1, 32)
