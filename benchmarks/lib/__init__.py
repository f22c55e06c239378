"""What several benchmarks use; nothing here imports a case."""
