"""Code that several benchmarks use; nothing here imports a case."""
