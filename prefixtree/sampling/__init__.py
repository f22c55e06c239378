"""Sampling on a growing prefix forest, with a Hugging Face model in this process.

sampler = TreeSampler(model, max_keys=300_000)
rows = sampler.start(PrefixForest.from_sequences(histories))
rows.branch(4)
rows.generate(max_new_tokens=256, draws=Draws(seed=7), stop=[eos])
samples = rows.samples()
"""

from prefixtree.errors import need_training

# before the modules that import it
need_training(__name__)

from prefixtree.sampling.draws import Draws  # noqa: E402
from prefixtree.sampling.rows import Rows, Samples  # noqa: E402
from prefixtree.sampling.sampler import TreeSampler  # noqa: E402

__all__ = ["Draws", "Rows", "Samples", "TreeSampler"]
