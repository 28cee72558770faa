"""Tiny models with random weights, which a real engine loads in a second: outputs are noise.

llama    2 layers, 2 heads, vocabulary of 256 words "t0", "t1", ...
gemma3   a sliding-window layer (64 tokens) and a full one
lora     an adapter of rank 8 for llama
wide     8 layers, 8 heads of 64: a block of 32 tokens is 512 KiB; for measurements only
"""

import json
import sys
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 251,
    "eos_token_id": 252,
    "pad_token_id": 250,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}t249 {% endif %}"
)


WIDE = SHAPE | {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}


def ensure(folder: Path, *names: str) -> Path:
    """Write the models of these names that the folder lacks; return the folder."""
    for name in names or ("llama", "gemma3", "lora"):
        done = folder / name / "done"
        if not done.exists():
            WRITERS[name](folder / name)
            done.touch()
    return folder


def _llama(out: Path, shape: dict[str, Any] = SHAPE) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False))
    model.to(torch.bfloat16).save_pretrained(out)
    _tokenizer(out)


def _wide(out: Path) -> None:
    _llama(out, WIDE)


def _gemma3(out: Path) -> None:
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    layers = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SHAPE, sliding_window=64, layer_types=layers)
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
    _tokenizer(out)


def _lora(out: Path) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(1)
    out.mkdir(parents=True, exist_ok=True)
    weights = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for part in ("q_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            weights[f"{name}.lora_A.weight"] = torch.randn(8, 64, dtype=torch.bfloat16) * 0.1
            weights[f"{name}.lora_B.weight"] = torch.randn(64, 8, dtype=torch.bfloat16) * 0.1
    save_file(weights, out / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "llama",
        "r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (out / "adapter_config.json").write_text(json.dumps(config))


def _tokenizer(out: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [f"t{i}" for i in range(250)] + ["<pad>", "<s>", "</s>", "<unk>", "x254", "x255"]
    vocabulary = {word: number for number, word in enumerate(words)}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)


WRITERS = {"llama": _llama, "gemma3": _gemma3, "lora": _lora, "wide": _wide}

if __name__ == "__main__":
    ensure(Path(sys.argv[1]), *sys.argv[2:])
