"""The common core of adapters: a batch on the host, trunks that its micro-batches keep, and the
tokens that packing saves. It knows no trainer."""
