from kimi_k3_kernels.situ.op import situ

__all__ = ["situ"]
