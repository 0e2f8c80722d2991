from kimi_k3_kernels.mla.op import mla_block_mass, mla_decode, mla_prefill

__all__ = ["mla_block_mass", "mla_decode", "mla_prefill"]
