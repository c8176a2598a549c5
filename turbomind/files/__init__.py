"""Files of checkpoints: safetensors, JSON objects and what all files of tensors share. Headers are
checked here, tensors are read by the core.

Not here: GGUF files (`turbomind.gguf`), what the tensors are for (`turbomind.loading`) and how
codes are stored (`turbomind.quant`).
"""
