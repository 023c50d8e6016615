"""Models, tokenizers and adapters: loading them, and their hidden states."""

# The seven projections of a llama-like block: the linear layers that the paper adapts.
LORA_TARGET_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
