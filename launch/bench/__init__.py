"""The benchmarks of every part, in one command."""
