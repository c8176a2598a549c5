"""What `tools/gpu_check.py` is made of: phases, each in a process of its own, and their record."""
