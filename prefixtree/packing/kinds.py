"""The compares a partial tile needs, as bits; 0 is a full tile. Shared by tables and kernels."""

CAUSAL, END, WINDOW = 1, 2, 4
