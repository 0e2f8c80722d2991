from kimi_k3_kernels.matvec.op import matvec

__all__ = ["matvec"]
