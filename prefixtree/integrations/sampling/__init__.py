"""Sampling on a growing prefix forest, with a Hugging Face model in this process.

sampler = TreeSampler(model, max_keys=300_000)
rows = sampler.start(PrefixForest.from_sequences(histories))
rows.branch(4)
rows.generate(max_new_tokens=256, draws=Draws(seed=7), stop=[eos])
samples = rows.samples()
"""

from prefixtree.integrations.sampling.draws import Draws
from prefixtree.integrations.sampling.rows import Rows
from prefixtree.integrations.sampling.sampler import TreeSampler
from prefixtree.integrations.sampling.samples import Samples

__all__ = ["Draws", "Rows", "Samples", "TreeSampler"]
