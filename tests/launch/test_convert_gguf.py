"""Our reading of a GGUF file against transformers' own, on a small file written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tp_runtime.launch.convert_gguf import convert_gguf

LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 2, 8, 2, 8, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def _byte_tokens() -> list[str]:
    """The 256 symbols of byte-level BPE, in no particular order."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def _tensor_shapes(tied: bool, vocab: int) -> dict[str, tuple[int, ...]]:
    width = HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocab, width), "output_norm": (width,)}
    if not tied:
        shapes["output"] = (vocab, width)
    for layer in range(LAYERS):
        for name, shape in {
            "attn_norm": (width,),
            "attn_q": (width, width),
            "attn_k": (KV_HEADS * HEAD_DIM, width),
            "attn_v": (KV_HEADS * HEAD_DIM, width),
            "attn_output": (width, width),
            "ffn_norm": (width,),
            "ffn_gate": (INTERMEDIATE, width),
            "ffn_up": (INTERMEDIATE, width),
            "ffn_down": (width, INTERMEDIATE),
        }.items():
            shapes[f"blk.{layer}.{name}"] = shape
    return shapes


def _write_gguf(path: Path, *, tied: bool = True, architecture: str = "llama") -> Path:
    """A llama with random weights: matrices as Q8_0, norms as float32."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    tokens = [*SPECIAL, *_byte_tokens(), "Ġt", "he"]
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HEADS * HEAD_DIM)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ġ t", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    random = np.random.default_rng(7)
    for name, shape in _tensor_shapes(tied, len(tokens)).items():
        value = random.standard_normal(shape, dtype=np.float32)
        if len(shape) == 2:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_weights_and_config_equal_what_transformers_reads(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    gguf = _write_gguf(tmp_path / "tiny.gguf", tied=tied)
    convert_gguf(gguf, tmp_path / "ours")
    reference = AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True)
    )
    ours = AutoModelForCausalLM.from_pretrained(str(tmp_path / "ours"))
    assert ours.config.tie_word_embeddings is tied
    assert ours.config.rms_norm_eps == 1e-5
    weights, wanted = ours.state_dict(), reference.state_dict()
    assert weights.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(weights[name], value.float()), name
    assert ("lm_head.weight" in load_file(tmp_path / "ours" / "model.safetensors")) is not tied
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(ours(ids).logits, reference.float()(ids).logits)


def test_generation_ends_at_the_end_token_of_the_file(tmp_path: Path) -> None:
    """transformers' own reading of the tokenizer takes the begin token for the end token."""
    from transformers import AutoTokenizer

    convert_gguf(_write_gguf(tmp_path / "tiny.gguf"), tmp_path / "ours")
    settings: dict[str, Any] = json.loads((tmp_path / "ours/generation_config.json").read_text())
    assert (settings["bos_token_id"], settings["eos_token_id"]) == (1, 2)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "ours"))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    message = {"role": "user", "content": "the message"}
    assert tokenizer.apply_chat_template([message], tokenize=False) == "the message"


def test_tokenizer_splits_digits_and_gives_back_every_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    convert_gguf(_write_gguf(tmp_path / "tiny.gguf"), tmp_path / "ours")
    tokenizer = Tokenizer.from_file(str(tmp_path / "ours" / "tokenizer.json"))
    assert tokenizer.encode("the the").tokens == ["t", "he", "Ġt", "he"]
    assert tokenizer.encode("<|im_start|>").ids == [1]
    text = "1234 ▁ héllo 👩‍👩‍👧 , the  end ."
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_file_of_another_architecture_is_refused(tmp_path: Path) -> None:
    gguf = _write_gguf(tmp_path / "tiny.gguf", architecture="gemma")
    with pytest.raises(ValueError, match="gemma"):
        convert_gguf(gguf, tmp_path / "ours")
