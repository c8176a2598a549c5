"""`lmchat bench`: measurements, each beside the ceilings of this machine.

Not here: comparisons with other engines (`benchmarks`) and checks of GPUs (`tools/gpu`).
"""
