from kimi_k3_kernels.attn_res.op import attn_res_mix, attn_res_mix_norm

__all__ = ["attn_res_mix", "attn_res_mix_norm"]
