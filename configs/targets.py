"""Sizes of published targets, as in their config.json: enough to compile for a pod without the weights."""

from ml_collections import config_dict


def qwen3_4b():
    return _qwen3(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True)


def qwen3_8b():
    return _qwen3(hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False)


def llama31_8b():
    return config_dict.ConfigDict({
        "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "rope_scaling": {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192}})


def smollm2_135m():
    return config_dict.ConfigDict({
        "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192,
        "rope_theta": 100_000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True})


def _qwen3(**sizes):
    return config_dict.ConfigDict({
        "vocab_size": 151_936, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40_960, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6,
        "qk_norm": True} | sizes)
