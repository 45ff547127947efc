#!/usr/bin/env python3
"""Write a tiny random-weight Hugging Face model folder that vLLM / SGLang can serve.

Needs torch, transformers and tokenizers (a vLLM environment has them); downloads nothing.

  python make_tiny_hf.py OUT_DIR [--kind llama|qwen3moe|hy3] [--layers 2] [--hidden 128]
"""

import argparse
import json
import pathlib

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

TEXT = """the quick brown fox jumps over the lazy dog while the engine schedules requests,
prefills prompts, decodes tokens, evicts cache blocks and reports metrics about all of it.
a queue forms when more requests arrive than the scheduler can run in one step. 0123456789"""
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("out")
    ap.add_argument("--kind", choices=("llama", "qwen3moe", "hy3"), default="llama")
    ap.add_argument("--layers", type=int, default=2)
    ap.add_argument("--hidden", type=int, default=128)
    ap.add_argument("--heads", type=int, default=4)
    ap.add_argument("--kv-heads", type=int, default=2)
    ap.add_argument("--head-dim", type=int, default=32)
    ap.add_argument("--max-len", type=int, default=4096)
    ap.add_argument("--experts", type=int, default=8)
    ap.add_argument("--seed", type=int, default=0)
    a = ap.parse_args()

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(
        TEXT.splitlines(),
        trainers.BpeTrainer(
            vocab_size=512,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|bos|>", "<|eos|>", "<|pad|>"],
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>", model_max_length=a.max_len
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(a.out)

    torch.manual_seed(a.seed)
    common = {
        "vocab_size": len(fast),
        "hidden_size": a.hidden,
        "intermediate_size": 2 * a.hidden,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "max_position_embeddings": a.max_len,
        "bos_token_id": fast.bos_token_id,
        "eos_token_id": fast.eos_token_id,
        "pad_token_id": fast.pad_token_id,
        "tie_word_embeddings": False,
    }
    if a.kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**common))
    elif a.kind == "hy3":  # Tencent Hy3: first layer dense, the rest sparse with one shared expert
        from transformers import HYV3Config, HYV3ForCausalLM

        model = HYV3ForCausalLM(
            HYV3Config(
                **common,
                num_experts=a.experts,
                num_experts_per_tok=2,
                num_shared_experts=1,
                moe_intermediate_size=a.hidden // 2,
            )
        )
    else:
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **common,
                num_experts=a.experts,
                num_experts_per_tok=2,
                moe_intermediate_size=a.hidden // 2,
                decoder_sparse_step=1,
                norm_topk_prob=True,
            )
        )
    model.save_pretrained(a.out, safe_serialization=True)
    if a.kind == "hy3":  # names that vLLM reads and transformers does not write
        path = pathlib.Path(a.out) / "config.json"
        config = json.loads(path.read_text())
        config.update(first_k_dense_replace=1, qk_norm=True, expert_hidden_dim=a.hidden // 2, route_norm=True)
        path.write_text(json.dumps(config, indent=1))
    print(f"{a.out}: {a.kind}, {sum(p.numel() for p in model.parameters())} parameters, tokenizer {len(fast)}")


if __name__ == "__main__":
    main()
