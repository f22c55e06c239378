"""Are our times below those of other kernels on the same machine, and by how much?

    python -m benchmarks compare_peers --ours attention.json --peers peers_*.json [--out OUT.json]

Ratios are our time over the peer's: below 1 we are faster. Only the main shape (32/8 heads, D 128,
bf16, heaviest-first, full size) is compared, which is what the other project's
`peers.py` runs (`tools/gpu_check.sh peers_a peers_b`). Targets were set before the kernels ran; one
whose peer or workload is missing is neither met nor missed, and said to be so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.runs import described, write
from benchmarks.lib.tables import Column, Parts, Table, show
from benchmarks.lib.workloads import AIRLINE, NAMES, RAGGED

MAIN = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "order": "heaviest"}
DOCUMENTS = "documents 32 x 4K"
SHORT = ("prompt 512 x 64 x 1K", "prompt 256 x 1024 x 256")
AGENTS = ("caterpillar 12", "caterpillar 24", AIRLINE)
PARTS = ("forward", "backward", "both")
TITLES = {
    "prototype": "prototype",
    "flex": "FlexAttention",
    "fa4tree": "flash-attn-4 tree",
    "fa2": "torch FA2",
    "fa4": "flash-attn-4 varlen",
}
Times = dict[tuple[str, str], dict[str, float]]


@dataclass(frozen=True)
class Target:
    """One ratio that was asked for, on one workload.

    Attributes:
        workload, peer, part: what is compared; part is one of PARTS.
        limit: the greatest ratio of our time to the peer's that meets it.
        ratio: what was measured, None where one of the two is missing.
    """

    workload: str
    peer: str
    part: str
    limit: float
    ratio: float | None

    @property
    def is_met(self) -> bool | None:
        """None where it could not be judged."""
        return None if self.ratio is None else self.ratio <= self.limit


def demands() -> Iterator[tuple[str, str, str, float]]:
    """(workload, peer, part, limit) of every target."""
    # ragged documents came after the targets
    for name in (name for name in NAMES if name != RAGGED):
        for part in ("forward", "backward"):
            yield name, "prototype", part, 0.9
            yield name, "flex", part, 1.0
    for name in SHORT:
        yield name, "fa4tree", "both", 1.0
    for name in AGENTS:
        yield name, "fa4tree", "both", 1.15
    for part in ("forward", "backward"):
        yield DOCUMENTS, "fa2", part, 1.0
        yield DOCUMENTS, "fa4", part, 1.4


def with_both(row: dict[str, Any]) -> dict[str, float]:
    """Milliseconds by part."""
    forward, backward = row["forward_ms"], row["backward_ms"]
    return {"forward": forward, "backward": backward, "both": forward + backward}


def our_times(data: dict[str, Any], backend: str | None) -> dict[str, dict[str, float]]:
    """By workload; red and failed cases have no times."""
    if data["environment"].get("scale", 1) != 1:
        raise ValueError("these are times of scaled-down workloads")
    rows = [r for r in data["rows"] if all(r.get(k) == v for k, v in MAIN.items())]
    backends = list(dict.fromkeys(r["backend"] for r in rows))
    if backend is None and len(backends) > 1:
        raise ValueError(f"there are several backends, choose one: {', '.join(backends)}")
    return {
        r["workload"]: with_both(r)
        for r in rows
        if "forward_ms" in r and backend in (None, r["backend"])
    }


def peer_times(files: Sequence[dict[str, Any]]) -> Times:
    """By (workload, peer), of all files of `peers.py`; first-come orders are left out."""
    times: Times = {}
    for data in files:
        for row in data["rows"]:
            if row["order"] != "heavy":
                continue
            key = row["workload"], row["peer"]
            if key in times:
                raise ValueError(f"{key} is in more than one file")
            times[key] = with_both(row)
    return times


def judge(ours: dict[str, dict[str, float]], peers: Times) -> list[Target]:
    """Every target with its ratio."""
    targets = []
    for name, peer, part, limit in demands():
        ratio = None
        if name in ours and (name, peer) in peers:
            ratio = ours[name][part] / peers[name, peer][part]
        targets.append(Target(name, peer, part, limit, ratio))
    return targets


def machines(ours: dict[str, Any], files: Sequence[dict[str, Any]]) -> list[str]:
    """Notes: differences between the machines of the files, and which peers were red."""
    notes, here = [], ours["environment"]
    for data in files:
        there = data["environment"]
        for what in ("gpu", "torch"):
            # one says 2.11.0, the other 2.11.0+cu130
            if here[what].split("+")[0] != there[what].split("+")[0]:
                notes.append(f"{what} differs: ours {here[what]}, peers {there[what]}")
        notes += [f"{peer} was red: {error}" for peer, error in there["red"].items()]
    return notes


def tables(data: dict[str, Any]) -> Parts:
    """A line per workload: our times, and forward / backward / both over each peer's."""
    ours, peers = data["ours"], data["peers"]

    def over(peer: str) -> Column:
        def cell(name: str) -> str:
            theirs = peers[name].get(peer)
            if theirs is None:
                return "-"
            return " ".join(f"{ours[name][part] / theirs[part]:.2f}" for part in PARTS)

        return Column(TITLES[peer], cell)

    def times(name: str) -> str:
        return " ".join(f"{ours[name][part]:.2f}" for part in PARTS)

    yield Table(
        [
            Column("ours / peer: fwd bwd both", lambda name: name),
            Column("ours ms: fwd bwd both", times),
            *(over(peer) for peer in TITLES if any(peer in found for found in peers.values())),
        ],
        [name for name in NAMES if name in ours],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every target was met, 1 if one was missed, 2 if some could not be judged."""
    parser = described(__doc__)
    parser.add_argument("--ours", type=Path, required=True, help="JSON of the case attention")
    parser.add_argument(
        "--peers", type=Path, nargs="+", required=True, help="JSON of peers_a and peers_b"
    )
    parser.add_argument("--backend", help="which of ours, where there are several")
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args(arguments)
    data = json.loads(options.ours.read_text())
    files = [json.loads(path.read_text()) for path in options.peers]
    ours, peers = our_times(data, options.backend), peer_times(files)
    targets, notes = judge(ours, peers), machines(data, files)
    missed = [t for t in targets if t.is_met is False]
    open_ = [t for t in targets if t.is_met is None]
    result = {
        "environment": {
            "ours": data["environment"],
            "peers": [f["environment"] for f in files],
        },
        "ours": ours,
        "peers": {name: {p: t for (n, p), t in peers.items() if n == name} for name in NAMES},
        "targets": [asdict(t) | {"is_met": t.is_met} for t in targets],
        "notes": notes,
    }
    write(options.out, result)
    show(tables(result))
    for note in notes:
        print(f"note: {note}")
    for what, some in (("MISSED", missed), ("open", open_)):
        for t in some:
            got = "not measured" if t.ratio is None else f"{t.ratio:.2f}"
            print(f"{what}: {t.workload}, {t.part} against {TITLES[t.peer]}: {got} (<= {t.limit})")
    met = len(targets) - len(missed) - len(open_)
    print(f"targets: {met} met, {len(missed)} missed, {len(open_)} open")
    return 1 if missed else 2 if open_ else 0
