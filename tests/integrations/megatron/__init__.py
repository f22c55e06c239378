"""Megatron on a CPU: what stands in for CUDA comes before anything here imports Megatron."""

from tests.support.megatron_cpu import stand_in

stand_in()
