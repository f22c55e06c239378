"""The compares a partial tile needs, as bits; 0 is a full tile.

Not compiled: whoever reads block tables may import it without importing numba.
"""

CAUSAL, END, WINDOW = 1, 2, 4
