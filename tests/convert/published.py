"""The config.json of published models: the facts of each, and what becomes of it.

Keys and values are those of the files on the hub (2019 to 2025), without long lists of labels.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Published(NamedTuple):
    """A published config.json.

    Attributes:
        config: its content.
        parameters: of the model; 0 where it is refused.
        refused: a pattern of the error that says why.
        accept: options that a user may insist on ignoring.
    """

    config: dict[str, Any]
    parameters: int = 0
    refused: str = ""
    accept: tuple[str, ...] = ()


SUMMARY = {
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
}
CHAT = {"task_specific_params": {"conversational": {"max_length": 1000}}}
TEXT = {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}
LABELS = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def gpt2(n_embd: int, n_layer: int, n_head: int, **more: Any) -> dict[str, Any]:
    """A GPT-2 file of 2019; `more` replaces keys, None in `n_ctx` leaves it out."""
    base = {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": n_embd,
        "n_head": n_head,
        "n_layer": n_layer,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        **SUMMARY,
        "vocab_size": 50257,
    }
    return base | more


def llama(hidden: int, inner: int, layers: int, heads: int, kv: int, **more: Any) -> dict[str, Any]:
    """A Llama file of 2023."""
    base = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": inner,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.31.0",
        "use_cache": True,
        "vocab_size": 32000,
    }
    return base | more


SMOL = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "vocab_size": 49152,
}
SMOL2 = SMOL | {
    "initializer_range": 0.041666666666666664,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "rope_interleaved": False,
    "rope_theta": 100000,
    "transformers_version": "4.40.1",
}
SMOL2_CHAT = SMOL2 | {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16", "q4f16": "float16"}},
    "transformers_version": "4.42.3",
}
LLAMA32 = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "vocab_size": 128256,
}
CEREBRAS = {
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "activation_function": "gelu",
    "n_positions": 2048,
    "n_ctx": None,
    "reorder_and_upcast_attn": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "torch_dtype": "float32",
    "transformers_version": "4.17.0",
    "use_cache": True,
} | dict.fromkeys(SUMMARY)
SW3 = {
    "_name_or_path": "gpt-sw3-126m",
    "activation_function": "gelu",
    "apply_query_key_layer_scaling": True,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "initializer_range": 0.023,
    "n_inner": 3072,
    "n_positions": 2048,
    "normalize_attention_scores": True,
    "pad_token_id": 0,
    "reorder_and_upcast_attn": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "tokenizer_class": "GPTSw3Tokenizer",
    "torch_dtype": "float32",
    "transformers_version": "4.22.1",
    "use_cache": True,
    "vocab_size": 64000,
}
RINNA = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "gradient_checkpointing": False,
    "n_inner": 3072,
    "scale_attn_weights": True,
    "tokenizer_class": "T5Tokenizer",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
}


def qwen2(hidden: int, inner: int, layers: int, heads: int, kv: int, context: int, **more: Any) -> dict[str, Any]:
    """A file of Qwen2 or Qwen2.5, with the sliding window switched off."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "max_position_embeddings": context,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "sliding_window": context,
        "tie_word_embeddings": True,
        "transformers_version": "4.40.1",
        "vocab_size": 151936,
    }
    return QWEN2 | sizes | more


MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
MISTRAL3 = {
    "attention_dropout": 0.0,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "transformers_version": "4.42.0.dev0",
    "vocab_size": 32768,
}


def pythia(hidden: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    """A Pythia file of 2022 and 2023."""
    base = {
        "architectures": ["GPTNeoXForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "gelu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": 4 * hidden,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "model_type": "gpt_neox",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.24.0",
        "use_cache": True,
        "use_parallel_residual": True,
        "vocab_size": 50304,
    }
    return base | more


PYTHIA_14M = {
    "attention_bias": True,
    "attention_dropout": 0.0,
    "classifier_dropout": 0.1,
    "hidden_dropout": 0.0,
    "rope_scaling": None,
}
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 262144,
}
GEMMA3_270M = GEMMA3 | {
    "_sliding_window_pattern": 6,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3,
    "num_hidden_layers": 18,
    "transformers_version": "4.55.0.dev0",
    "use_bidirectional_attention": False,
}
GEMMA3_1B = GEMMA3 | {
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "sliding_window_pattern": 6,
    "transformers_version": "4.50.0.dev0",
}
OLMO2 = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.47.1",
    "use_cache": False,
    "vocab_size": 100352,
}
DUMPED = {  # as `to_dict` of transformers 4 writes every default
    "_name_or_path": "gpt2",
    "add_cross_attention": False,
    "bad_words_ids": None,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "decoder_start_token_id": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "finetuning_task": None,
    "forced_bos_token_id": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "length_penalty": 1.0,
    "max_length": 20,
    "n_inner": None,
    "num_beam_groups": 1,
    "num_beams": 1,
    "output_attentions": False,
    "output_past": True,
    "prefix": None,
    "problem_type": None,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "return_dict": True,
    "sep_token_id": None,
    "temperature": 1.0,
    "tie_encoder_decoder": False,
    "tie_word_embeddings": True,
    "top_k": 50,
    "top_p": 1.0,
    "torchscript": False,
    "typical_p": 1.0,
    "use_bfloat16": False,
}
DECAPODA = llama(4096, 11008, 32, 32, 32, architectures=["LLaMAForCausalLM"], pad_token_id=-1, rms_norm_eps=1e-06)
for key in ("num_key_value_heads", "pretraining_tp", "rope_scaling", "tie_word_embeddings", "max_position_embeddings"):
    DECAPODA.pop(key)

PUBLISHED = {
    "openai-community/gpt2": Published(gpt2(768, 12, 12, **TEXT), 124_439_808),
    "openai-community/gpt2-medium": Published(
        gpt2(1024, 24, 16, n_special=0, predict_special_tokens=True), 354_823_168
    ),
    "openai-community/gpt2-large": Published(gpt2(1280, 36, 20, **TEXT), 774_030_080),
    "distilbert/distilgpt2": Published(gpt2(768, 6, 12, _num_labels=1, **LABELS, **TEXT), 81_912_576),
    "microsoft/DialoGPT-small": Published(gpt2(768, 12, 12, **CHAT), 124_439_808),
    "sshleifer/tiny-gpt2": Published(gpt2(2, 2, 2, **TEXT), 102_714),
    "cerebras/Cerebras-GPT-111M": Published(gpt2(768, 10, 12, n_inner=3072, **CEREBRAS), 111_050_496),
    "AI-Sweden-Models/gpt-sw3-126m": Published(gpt2(768, 12, 12, **SW3), 135_780_864),
    "rinna/japanese-gpt2-small": Published(gpt2(768, 12, 12, **RINNA), 110_418_432),
    "a GPT-2 saved with every default": Published(gpt2(768, 12, 12, **DUMPED), 124_439_808),
    "HuggingFaceTB/SmolLM-135M": Published(llama(576, 1536, 30, 9, 3, **SMOL), 134_515_008),
    "HuggingFaceTB/SmolLM-360M": Published(llama(960, 2560, 32, 15, 5, **SMOL), 361_821_120),
    "HuggingFaceTB/SmolLM2-135M": Published(llama(576, 1536, 30, 9, 3, **SMOL2), 134_515_008),
    "HuggingFaceTB/SmolLM2-135M-Instruct": Published(llama(576, 1536, 30, 9, 3, **SMOL2_CHAT), 134_515_008),
    "HuggingFaceTB/SmolLM2-360M-Instruct": Published(llama(960, 2560, 32, 15, 5, **SMOL2_CHAT), 361_821_120),
    "HuggingFaceTB/SmolLM2-1.7B": Published(
        llama(2048, 8192, 24, 32, 32, **(SMOL2 | {"rope_theta": 130000, "rope_interleaved": None})), 1_711_376_384
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": Published(
        llama(2048, 5632, 22, 32, 4, attention_bias=False, rope_theta=10000.0, torch_dtype="bfloat16"), 1_100_048_384
    ),
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T": Published(llama(2048, 5632, 22, 32, 4), 1_100_048_384),
    "PY007/TinyLlama-1.1B-Chat-v0.3": Published(
        llama(2048, 5632, 22, 32, 4, vocab_size=32003, _name_or_path="x"), 1_100_060_672
    ),
    "meta-llama/Llama-2-7b-hf": Published(
        llama(4096, 11008, 32, 32, 32, max_position_embeddings=4096, _name_or_path="meta-llama/Llama-2-7b-hf"),
        6_738_415_616,
    ),
    "decapoda-research/llama-7b-hf": Published(DECAPODA | {"max_sequence_length": 2048}, 6_738_415_616),
    "meta-llama/Llama-3.2-1B": Published(llama(2048, 8192, 16, 32, 8, **LLAMA32), 1_235_814_400),
    "meta-llama/Llama-3.2-1B-Instruct": Published(
        llama(2048, 8192, 16, 32, 8, **(LLAMA32 | {"eos_token_id": [128001, 128008, 128009]})), 1_235_814_400
    ),
    "unsloth/Llama-3.2-1B-Instruct": Published(
        llama(2048, 8192, 16, 32, 8, **LLAMA32, pad_token_id=128004, unsloth_fixed=True, unsloth_version="2024.9"),
        1_235_814_400,
    ),
    "JackFram/llama-160m": Published(
        llama(768, 3072, 12, 12, 12, bos_token_id=0, pad_token_id=1, rms_norm_eps=1e-06, _name_or_path="x"), 162_417_408
    ),
    "JackFram/llama-68m": Published(
        llama(768, 3072, 2, 12, 12, bos_token_id=0, pad_token_id=1, rms_norm_eps=1e-06), 68_030_208
    ),
    "Xenova/llama2.c-stories15M": Published(
        llama(288, 768, 6, 6, 6, _name_or_path="llama2.c-stories15M", max_position_embeddings=256), 24_407_712
    ),
    "Qwen/Qwen3-0.6B": Published(QWEN3, 596_049_920),
    "Qwen/Qwen2-1.5B": Published(qwen2(1536, 8960, 28, 12, 2, 131072), 1_543_714_304),
    "Qwen/Qwen2.5-0.5B": Published(qwen2(896, 4864, 24, 14, 2, 32768, use_mrope=False), 494_032_768),
    "Qwen/Qwen2.5-0.5B-Instruct": Published(
        qwen2(896, 4864, 24, 14, 2, 32768, eos_token_id=151645, max_window_layers=21), 494_032_768
    ),
    "Qwen/Qwen2.5-7B": Published(
        qwen2(3584, 18944, 28, 28, 4, 131072, tie_word_embeddings=False, use_mrope=False, vocab_size=152064),
        7_615_616_512,
    ),
    "mistralai/Mistral-7B-v0.1": Published(MISTRAL, 7_241_732_096),
    "mistralai/Mistral-7B-v0.3": Published(MISTRAL | MISTRAL3, 7_248_023_552),
    "EleutherAI/pythia-14m": Published(pythia(128, 6, 4, **PYTHIA_14M), 14_067_712),
    "EleutherAI/pythia-70m": Published(pythia(512, 6, 8), 70_426_624),
    "EleutherAI/pythia-160m": Published(pythia(768, 12, 12), 162_322_944),
    "EleutherAI/pythia-410m": Published(pythia(1024, 24, 16), 405_334_016),
    "EleutherAI/pythia-1.4b": Published(pythia(2048, 24, 16), 1_414_647_808),
    "google/gemma-3-270m": Published(GEMMA3_270M, 268_098_176),
    "google/gemma-3-1b-it": Published(GEMMA3_1B, 999_885_952),
    "allenai/OLMo-2-0425-1B": Published(OLMO2, 1_484_916_736),
    "deepseek-ai/deepseek-coder-1.3b-base": Published(
        llama(
            2048,
            5504,
            24,
            16,
            16,
            bos_token_id=32013,
            eos_token_id=32014,
            max_position_embeddings=16384,
            rms_norm_eps=1e-06,
            rope_scaling={"factor": 4.0, "type": "linear"},
            rope_theta=100000,
            torch_dtype="bfloat16",
            vocab_size=32256,
        ),
        1_346_471_936,
    ),
    # Refused, each for a true reason.
    "google/gemma-3-4b-it": Published(
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": {}},
        refused="model_type 'gemma3' is not supported: one of .*gemma3_text.*docs/families.md",
    ),
    "google/gemma-2-2b": Published({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, refused="gemma2"),
    "a Qwen2 with M-RoPE": Published(qwen2(896, 4864, 24, 14, 2, 32768, use_mrope=True), refused="use_mrope True"),
    "EleutherAI/gpt-neo-125m": Published(
        {"model_type": "gpt_neo", "attention_layers": ["global", "local"]}, refused="gpt_neo"
    ),
    "facebook/opt-125m": Published({"model_type": "opt", "do_layer_norm_before": True}, refused="model_type 'opt'"),
    "openbmb/MiniCPM-2B-sft-bf16": Published({"model_type": "minicpm", "scale_emb": 12}, refused="minicpm"),
    "Qwen/Qwen1.5-MoE-A2.7B": Published({"model_type": "qwen2_moe"}, refused="qwen2_moe"),
    "NousResearch/Yarn-Llama-2-7b-64k": Published(
        llama(4096, 11008, 32, 32, 32, rope_scaling={"factor": 16.0, "type": "yarn", "finetuned": True}), refused="yarn"
    ),
    "a Llama with options of its own": Published(
        llama(1536, 4096, 24, 16, 16, input_bits=8, weight_bits=1),
        777_856_512,
        refused="unknown options input_bits.*weight_bits.*--accept-option input_bits weight_bits",
        accept=("input_bits", "weight_bits"),
    ),
    "a Llama quantized to four bits": Published(
        llama(768, 3072, 12, 12, 12, quantization_config={"bits": 4, "quant_method": "gptq"}),
        162_417_408,
        refused="quantization_config.*--accept-option quantization_config",
        accept=("quantization_config",),
    ),
    "a GPT-2 with cross attention": Published(
        gpt2(768, 12, 12, add_cross_attention=True), refused="add_cross_attention"
    ),
    "a Llama with one bias": Published(llama(768, 3072, 12, 12, 12, attention_bias=True), refused="mlp_bias False"),
}
IMPORTED = [name for name, model in PUBLISHED.items() if model.parameters and not model.refused]
