"""Fixtures of rlk_rollout's tests: tiny real models and a tokenizer made on the spot."""

from __future__ import annotations

import pytest
import torch

VOCABULARY = 61
END = 5


def make_model(kind="Qwen3", **options):
    """A two-layer causal LM with random weights, wide enough that its distributions are far from uniform."""
    import transformers

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.3, "eos_token_id": END,
    }  # fmt: skip
    if kind in ("Qwen3", "Llama", "Gemma2"):
        sizes |= {"num_key_value_heads": 2, "head_dim": 8, "bos_token_id": None, "pad_token_id": None}
    if kind == "GPT2":
        sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
                 "initializer_range": 0.3, "eos_token_id": END, "bos_token_id": END}  # fmt: skip
    suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    return getattr(transformers, kind + suffix)(getattr(transformers, kind + "Config")(**{**sizes, **options})).eval()


@pytest.fixture(scope="session")
def model_of():
    return make_model


@pytest.fixture(scope="session")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["zero", "one", "two", "three", "four", "<end>"] + [f"w{i}" for i in range(6, VOCABULARY)]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="zero"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
