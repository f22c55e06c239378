"""A wing: mixtures of experts, and the losses and records of their routers."""
