from kimi_k3_kernels.mla.op import mla_decode, mla_decode_mass, mla_prefill

__all__ = ["mla_decode", "mla_decode_mass", "mla_prefill"]
