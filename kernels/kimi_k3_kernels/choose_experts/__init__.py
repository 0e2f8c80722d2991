from kimi_k3_kernels.choose_experts.op import choose_experts

__all__ = ["choose_experts"]
