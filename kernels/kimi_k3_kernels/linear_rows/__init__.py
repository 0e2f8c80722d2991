from kimi_k3_kernels.linear_rows.op import linear_rows

__all__ = ["linear_rows"]
