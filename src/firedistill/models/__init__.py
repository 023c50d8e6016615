"""Models, tokenizers and adapters: how they are loaded, and the hidden states of responses."""

# The seven projections of a llama-like block, which the paper adapts.
LORA_TARGET_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
