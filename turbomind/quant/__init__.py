"""Quantized checkpoints: codes and scales as the core takes them, a file per scheme.

Not here: quantization of 16-bit weights while they are loaded (`turbomind.loading`), and the
products with codes (`cpp/linear`).
"""
