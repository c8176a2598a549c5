"""The parts of `tools/gpu_check.py`: phases, each in its own process, and their record."""
