"""A base model whose attention heads are padded with zeros, for vLLM's CPU kernels, which support few head sizes.

    python -m firedistill.rollouts.padding lab lab-for-vllm      a folder that a vLLM server on a CPU can load

A head of size d becomes one of size D, with the same attention. Its first half lies at 0 and its second half at D/2, so that rotary
embeddings, which turn dimensions i and i + D/2 together by position * theta^(-2i/D), need only theta^(D/d) for theta. The softmax scale
changes from d^(-1/2) to D^(-1/2); the queries are multiplied by sqrt(D/d). The padded model is a Llama, whose head size is free of the
width.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

SUPPORTED = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vllm.v1.attention.backends.cpu_attn, version 0.32
KEPT = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


class PaddingError(ValueError):
    """A model whose heads cannot be padded."""


@dataclass(frozen=True)
class HeadPadding:
    """Heads of `size` numbers, each in a head of `padded` numbers."""

    size: int
    padded: int

    def tensors(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights, biases and LoRA factors of the padded model from those of the model itself, in the same dtype.

        Args:
            state: tensors by their names in a checkpoint or an adapter.
        """
        return {name: self._tensor(name, tensor) for name, tensor in state.items()}

    def _tensor(self, name: str, tensor: Tensor) -> Tensor:
        kinds = {kind for kind in ("q_proj", "k_proj", "v_proj", "o_proj") if f".self_attn.{kind}." in name}
        if not kinds or ("o_proj" in kinds and (".lora_B." in name or tensor.dim() == 1)):
            return tensor
        if "o_proj" in kinds:  # [H, heads * size] or, the factor A, [r, heads * size]
            return self._rows(tensor.T).T.contiguous()
        if ".lora_A." in name:
            return tensor
        rows = self._rows(tensor)
        return (rows.float() * math.sqrt(self.padded / self.size)).to(rows.dtype) if "q_proj" in kinds else rows

    def _rows(self, tensor: Tensor) -> Tensor:
        heads = tensor.unflatten(0, (-1, 2, self.size // 2))
        padded = heads.new_zeros(heads.shape[0], 2, self.padded // 2, *tensor.shape[1:])
        padded[:, :, : self.size // 2] = heads
        return padded.flatten(0, 2)

    def config(self, config: Any) -> LlamaConfig:
        """The configuration of the padded model.

        Raises:
            PaddingError: the model is not a Llama or Qwen2 with plain rotary embeddings and full attention.
        """
        rope = config.rope_parameters
        sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
        plain = config.model_type in ("llama", "qwen2") and rope["rope_type"] == "default" and not sliding
        if not plain or not self.size <= self.padded <= 4 * self.size:  # beyond, theta^(D/d) would leave the range of float32
            raise PaddingError(
                f"heads of {self.size} numbers are not supported by vLLM on CPUs ({', '.join(map(str, SUPPORTED))} are), and can be "
                "padded for Llama and Qwen2 with plain rotary embeddings and full attention only, from 8 on; use --rollouts hf"
            )
        return LlamaConfig(
            **{name: getattr(config, name) for name in KEPT},
            head_dim=self.padded,
            attention_bias=config.model_type == "qwen2" or config.attention_bias,
            mlp_bias=getattr(config, "mlp_bias", False),
            rope_parameters={"rope_type": "default", "rope_theta": rope["rope_theta"] ** (self.padded / self.size)},
        )

    def write(self, config: Any, state: Mapping[str, Tensor], folder: Path) -> None:
        """Write a checkpoint of the padded model.

        Args:
            config, state: of the model itself, by the names of its checkpoint.
        """
        padded_config = self.config(config)
        with torch.device("meta"):
            padded = LlamaForCausalLM(padded_config)
        tensors = self.tensors(state)
        if config.model_type == "qwen2":  # the biases of a Llama include the output's
            like = next(iter(tensors.values()))
            tensors |= {n: like.new_zeros(b.shape) for n, b in padded.state_dict().items() if n.endswith("o_proj.bias")}
        padded.load_state_dict(tensors, assign=True)
        padded.tie_weights()
        padded.save_pretrained(folder)


def head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def cache_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of a token, over all layers; 0 for a model without attention."""
    if getattr(config, "num_attention_heads", None) is None:
        return 0
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_size(config) * dtype.itemsize


def padding_on_cpu(config: Any) -> HeadPadding | None:
    """The padding to the next size that vLLM supports on CPUs; None where it supports the model's own.

    Raises:
        PaddingError: the heads cannot be padded.
    """
    if getattr(config, "num_attention_heads", None) is None:
        raise PaddingError(f"{config.model_type} has no attention heads, which vLLM needs on a CPU: use --rollouts hf")
    size = head_size(config)
    if size in SUPPORTED:
        return None
    padding = HeadPadding(size, next((larger for larger in SUPPORTED if larger > size), SUPPORTED[-1]))
    padding.config(config)
    return padding


def padding_in(folder: str, config: Any) -> HeadPadding | None:
    """The padding of a checkpoint of the model `config`; None if the folder cannot be read or holds the model itself.

    Raises:
        ValueError: it is not a padded checkpoint of such a model.
    """
    file = Path(folder) / "config.json"
    served = json.loads(file.read_text(encoding="utf-8")).get("head_dim") if folder and file.is_file() else None
    if served in (None, size := head_size(config)):
        return None
    if type(served) is not int or served < size:
        raise ValueError(f"{file} has head_dim {served!r}; expected {size} or, padded, more")
    padding = HeadPadding(size, served)
    padding.config(config)
    return padding


def main() -> None:
    from firedistill.models.loading import load_model_and_tokenizer

    parser = argparse.ArgumentParser(description="Write a model with padded heads, for a vLLM server on a CPU.")
    parser.add_argument("model", help="hub id, folder, .gguf file, smollm2 or lab")
    parser.add_argument("folder", type=Path, help="where to write it, in float32")
    options = parser.parse_args()
    try:
        model, tokenizer = load_model_and_tokenizer(options.model, dtype="float32")
        padding = padding_on_cpu(model.config.get_text_config())
        if padding is None:
            parser.error(f"vLLM supports the heads of {options.model} as they are")
        padding.write(model.config, model.state_dict(), options.folder)
        tokenizer.save_pretrained(options.folder)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"wrote {options.folder.absolute()}: heads of {padding.size} numbers in {padding.padded}; give the server this path")


if __name__ == "__main__":
    main()
