"""The Open Inference Protocol (`/v2`) and Triton's `generate` extension.

The model has the tensors of Triton's vLLM backend: `text_input` and settings in, `text_output` and
counts out. Prompts are continued as they are, without a chat template.

Formats: https://github.com/kserve/open-inference-protocol and the extensions `binary_tensor_data`
and `generate` of the Triton Inference Server.

Not here: replies to messages (`lmchat.server.openai`), and gRPC.
"""
