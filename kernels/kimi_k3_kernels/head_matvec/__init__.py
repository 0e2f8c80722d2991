from kimi_k3_kernels.head_matvec.op import head_matvec

__all__ = ["head_matvec"]
