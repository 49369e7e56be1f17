"""A target and a drafter of a few thousand parameters, with a tokenizer of one token a byte.

The target's layers add nothing, so the next token depends on the last one only, and a vanilla transition over all of
the width is the same law: without noise, every draft is accepted.
"""

import jax
import jax.numpy as jnp
from test_tokenizer import toy_metadata

from dspark_jax.backbone import BackboneConfig
from dspark_jax.drafter import DrafterConfig, attach, init_params
from dspark_jax.target import Decoder, Target, TargetConfig
from dspark_jax.tokenizer import Tokenizer

SIZES = {"hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}


def target(context=2048):
    tokenizer = Tokenizer.from_gguf(toy_metadata())
    config = TargetConfig(**SIZES, num_hidden_layers=2, vocab_size=tokenizer.vocab_size, tie_word_embeddings=False,
                          max_position_embeddings=context)
    params = Decoder(config).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32), method=Decoder.everything)["params"]
    for i in range(config.num_hidden_layers):
        layer = params[f"layers_{i}"]
        for output in (layer["self_attn"]["o_proj"], layer["mlp"]["down_proj"]):
            output["weight"] = jnp.zeros_like(output["weight"])
    return Target(config, params, tokenizer)


def drafter(target, noise=0.0, block_length=3, confidence=False, copy_length=0):
    c = target.config
    config = DrafterConfig(
        backbone=BackboneConfig(**SIZES, num_hidden_layers=1), vocab_size=c.vocab_size, draft_vocab_size=c.vocab_size,
        block_length=block_length, layout="anchor_first", target_layer_ids=(0, 1), mask_token_id=0,
        transition="vanilla", rank=c.hidden_size, confidence=confidence, copy_length=copy_length)
    params = init_params(config, jax.random.key(1))
    params["backbone"]["norm"] = jax.tree.map(jnp.zeros_like, params["backbone"]["norm"])  # base logits zero
    embedding, head = target.embedding(), target.head_rows()
    params["transition"] = {
        "predecessor": embedding / jnp.sqrt(jnp.mean(embedding**2, axis=-1, keepdims=True) + c.rms_norm_eps),
        "successor": head + noise * jnp.std(head) * jax.random.normal(jax.random.key(2), head.shape),
    }
    return attach(config, params, target)
