#!/usr/bin/env python3
"""Write a tiny random-weight GGUF that llama-server can load (needs: pip install gguf numpy).

Llama architecture, byte-level BPE vocabulary of 256 bytes + a few merges + 2 specials.
The text it makes is noise; it exists so that a real llama-server can be started,
loaded and scraped without downloading a model.

  python make_tiny_gguf.py OUT.gguf [--layers 2] [--dim 128] [--ctx 4096]
"""

import argparse

import gguf
import numpy as np


def bytes_to_unicode():
    """GPT-2's printable stand-ins for the 256 byte values."""
    bs = list(range(ord("!"), ord("~") + 1)) + list(range(ord("¡"), ord("¬") + 1)) + list(range(ord("®"), ord("ÿ") + 1))
    cs = bs[:]
    n = 0
    for b in range(256):
        if b not in bs:
            bs.append(b)
            cs.append(256 + n)
            n += 1
    return [chr(c) for _, c in sorted(zip(bs, cs, strict=False))]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("out")
    ap.add_argument("--layers", type=int, default=2)
    ap.add_argument("--dim", type=int, default=128)
    ap.add_argument("--heads", type=int, default=4)
    ap.add_argument("--kv-heads", type=int, default=2)
    ap.add_argument("--ff", type=int, default=256)
    ap.add_argument("--ctx", type=int, default=4096)
    ap.add_argument("--seed", type=int, default=0)
    a = ap.parse_args()

    byte_tokens = bytes_to_unicode()
    pairs = [("Ġ", "t"), ("h", "e"), ("Ġ", "a"), ("i", "n"), ("r", "e"), ("o", "n"), ("Ġt", "he")]
    merged = [x + y for x, y in pairs]
    specials = ["<|bos|>", "<|endoftext|>"]
    tokens = byte_tokens + merged + specials
    types = [gguf.TokenType.NORMAL] * (len(byte_tokens) + len(merged)) + [gguf.TokenType.CONTROL] * len(specials)
    bos, eos = len(tokens) - 2, len(tokens) - 1

    rng = np.random.default_rng(a.seed)
    head = a.dim // a.heads
    w = gguf.GGUFWriter(a.out, "llama")
    w.add_name("tiny-random")
    w.add_context_length(a.ctx)
    w.add_embedding_length(a.dim)
    w.add_block_count(a.layers)
    w.add_feed_forward_length(a.ff)
    w.add_head_count(a.heads)
    w.add_head_count_kv(a.kv_heads)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(head)
    w.add_vocab_size(len(tokens))
    w.add_file_type(gguf.LlamaFileType.ALL_F32)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges([f"{x} {y}" for x, y in pairs])
    w.add_bos_token_id(bos)
    w.add_eos_token_id(eos)
    w.add_add_bos_token(False)
    w.add_chat_template(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )

    def t(name, *shape, scale=0.05):
        w.add_tensor(name, (rng.standard_normal(shape) * scale).astype(np.float32))

    def ones(name, n):
        w.add_tensor(name, np.ones(n, dtype=np.float32))

    t("token_embd.weight", len(tokens), a.dim, scale=1.0)
    for i in range(a.layers):
        p = f"blk.{i}."
        ones(p + "attn_norm.weight", a.dim)
        t(p + "attn_q.weight", a.heads * head, a.dim)
        t(p + "attn_k.weight", a.kv_heads * head, a.dim)
        t(p + "attn_v.weight", a.kv_heads * head, a.dim)
        t(p + "attn_output.weight", a.dim, a.heads * head)
        ones(p + "ffn_norm.weight", a.dim)
        t(p + "ffn_gate.weight", a.ff, a.dim)
        t(p + "ffn_up.weight", a.ff, a.dim)
        t(p + "ffn_down.weight", a.dim, a.ff)
    ones("output_norm.weight", a.dim)
    t("output.weight", len(tokens), a.dim)

    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    print(f"{a.out}: {a.layers} layers, dim {a.dim}, vocab {len(tokens)}")


if __name__ == "__main__":
    main()
