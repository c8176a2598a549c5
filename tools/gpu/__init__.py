"""The parts of `tools/gpu_check.py`: phases, each in its own process, and their record.

Not here: the records themselves (`benchmarks/gpu`), and benchmarks of the CPU (`benchmarks`).
"""
