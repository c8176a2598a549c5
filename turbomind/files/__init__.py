"""Files of tensors: safetensors and GGUF. Headers are checked here, tensors are read by the core.

Not here: what the tensors are for (`turbomind.loading`) and how codes are stored
(`turbomind.quant`).
"""
