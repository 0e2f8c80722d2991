from kimi_k3_kernels.matvec.op import beats_library_gemm, matvec, matvec_op

__all__ = ["beats_library_gemm", "matvec", "matvec_op"]
