"""Sampling on a growing prefix forest, with a Hugging Face model in this process.

sampler = TreeSampler(model, max_keys=300_000)
rows = sampler.start(PrefixForest.from_sequences(histories))
rows.branch(4)
rows.generate(max_new_tokens=256, draws=Draws(seed=7), stop=[eos])
samples = rows.samples()
"""

from prefixtree.sampling.draws import Draws
from prefixtree.sampling.rows import Rows, Samples
from prefixtree.sampling.sampler import TreeSampler

__all__ = ["Draws", "Rows", "Samples", "TreeSampler"]
