"""The common core of adapters, which knows no trainer: a batch on the host, trunks that its
micro-batches keep, and the tokens that packing saves.
"""
