"""Fields of config.json that change what a model computes and that nothing here implements.

A field is read by `ModelConfig`, known to be harmless, or refused by name: never ignored although
it could change results. Fields that nobody knows and whose names do not sound like mathematics are
reported, so that they can be logged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tp_runtime.config_reader import short
from tp_runtime.errors import ConfigError

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # activation
    "hidden_activation": ("silu", "swish", None),
    "activation_function": ("silu", "swish", None),
    # attention
    "attn_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "position_embedding_type": ("rope", "rotary", None),
    "rope_interleaved": (False, None),
    "is_causal": (True, None),
    "is_decoder": (True, False, None),
    "use_bidirectional_attention": (False, None),
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "use_parallel_residual": (False, None),
    "parallel_attn": (False, None),
    # scales, all 1 where a config names them without using them
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "logits_scaling": (1, None),
    "logit_scale": (1, None),
    "scale_emb": (1, None),
    "scale_depth": (1, None),
    "final_logit_softcapping": (None,),
    # layers of another kind
    "num_experts": (0, None),
    "num_local_experts": (0, 1, None),
    "n_routed_experts": (0, None),
    "per_layer_config": ({}, None),
    # weights in another format
    "quantization_config": (None,),
    "quantization": (None,),
    "compression_config": (None,),
}
"""Known fields and the values at which they change nothing."""

_HARMLESS = frozenset(
    """
    architectures model_type _name_or_path name_or_path transformers_version transformers.js_config
    torch_dtype dtype use_cache initializer_range attention_dropout hidden_dropout resid_pdrop
    hidden_dropout_prob attention_probs_dropout_prob embd_pdrop dropout
    pad_token_id unk_token_id sep_token_id cls_token_id tokenizer_class vocab_file
    output_attentions output_hidden_states return_dict return_dict_in_generate problem_type
    id2label label2id num_labels task_specific_params finetuning_task gradient_checkpointing
    pretraining_tp torchscript auto_map attn_implementation _attn_implementation
    _attn_implementation_autoset chunk_size_feed_forward is_llama_config use_return_dict
    max_window_layers use_sliding_window model_max_length max_length min_length temperature top_k
    top_p do_sample num_beams repetition_penalty typical_p suppress_tokens begin_suppress_tokens
    tie_encoder_decoder cross_attention_hidden_size decoder_start_token_id prefix tf_legacy_loss
    use_bfloat16 remove_invalid_values forced_bos_token_id forced_eos_token_id unsloth_version
    unsloth_fixed max_sequence_length
    """.split()
)
"""Training, bookkeeping and generation settings. `pretraining_tp` slices a product and changes
nothing else; the two window fields matter only where a window is read (see `ModelConfig`)."""

_SOUNDS_LIKE_MATHEMATICS = re.compile(
    "softcap|multiplier|scal(e|ing|ar)|expert|moe|quant|window|alibi|sink|sparse|mrope|interleave"
    "|no_rope|rotary|qk_|_norm|norm_|bias|conv|ssm|mamba|mixer|clip|mup|hidden_act|layer_types"
    "|parallel|_mult$|attn_|logit"
)


def check_remaining_fields(remaining: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Judges the fields of a config that `ModelConfig` has not read.

    Returns the names of unknown fields that do not look as if they changed the mathematics, which
    transformers ignores too. Raises ConfigError naming every field that does."""
    refused, unknown = [], []
    for name, value in sorted(remaining.items()):
        if name in _HARMLESS:
            continue
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                refused.append(f"{name}={short(value)}")
        elif value in (None, False, 0, "", [], {}):
            continue
        elif _SOUNDS_LIKE_MATHEMATICS.search(name):
            refused.append(f"{name}={short(value)}")
        else:
            unknown.append(name)
    if refused:
        raise ConfigError(
            f"{where} sets {', '.join(refused)}, which would change the results and is not "
            "implemented for this architecture; use a model without it (or, where the model does "
            "not need the field, remove it from the file)."
        )
    return tuple(unknown)
