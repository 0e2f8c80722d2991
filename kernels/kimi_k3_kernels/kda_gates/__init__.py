from kimi_k3_kernels.kda_gates.op import kda_gates

__all__ = ["kda_gates"]
