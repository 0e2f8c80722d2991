from kimi_k3_kernels.matvec.op import beats_library_gemm, matvec

__all__ = ["beats_library_gemm", "matvec"]
