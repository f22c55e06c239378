"""Log-probabilities and entropies of a linear lm_head, and their gradients."""
