"""The output of `prefixtree doctor`: plain lines, to paste into an issue."""

from __future__ import annotations

from rich.console import Console

from prefixtree.doctor import Health, Package

_GIB = 2**30


def show(health: Health, console: Console) -> None:
    """Prints about 25 plain lines, to be pasted."""

    def line(name: str, text: str) -> None:
        console.print(f"{name:<13} {text}", markup=False, soft_wrap=True)

    line("prefixtree", f"{health.prefixtree} in {health.folder}")
    line("python", f"{health.python}, {health.system}")
    for package in health.packages:
        line(package.wanted.name, _described(package, health.cuda))
    for i, gpu in enumerate(health.gpus):
        memory = f"{gpu.memory / _GIB:.0f} GiB"
        line(f"GPU {i}", f"{gpu.name}, compute capability {gpu.capability}, {memory}")
    if not health.gpus:
        line("GPU", f"none: {health.gpu_problem}" if health.gpu_problem else "none")
    for backend in health.backends:
        line("backend", f"{', '.join(backend.heads)}: {backend.says}")
    for backend in health.recurrences:
        line("recurrence", f"{', '.join(backend.heads)}: {backend.says}")
    for problem in health.broken:
        line("BROKEN", problem)
    if not health.broken:
        line("ok", "nothing that is required is missing or broken")


def _described(package: Package, cuda: str | None) -> str:
    wanted = package.wanted
    if package.version is None:
        what = f" (for {wanted.used_for})" if wanted.used_for else ""
        return f"not installed{what}: {wanted.install}"
    if wanted.name == "torch":
        version = f"{package.version}, built for {cuda or 'the CPU'}"
    else:
        version = package.version
    return version if package.problem is None else f"{version}, {package.problem}"
