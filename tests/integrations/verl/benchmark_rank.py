"""`python -m tests.integrations.verl.benchmark_rank OPTIONS`: the benchmark `verl_update` on a CPU,
which verl has no platform for; alone or as a rank of torchrun."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """The benchmark's exit code."""
    os.environ["VERL_PLATFORM"] = "cpu"
    from benchmarks.cases import verl_update
    from benchmarks.lib import verl_worker

    joined = verl_worker.join

    def join(options: object) -> object:
        ranks = joined(options)
        # these import verl, which looks for what is missing as it is imported
        from tests.integrations.verl.cpu_platform import register_engines

        register_engines()
        return ranks

    verl_update.join = join
    return verl_update.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
