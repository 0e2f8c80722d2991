from kimi_k3_kernels.short_conv.op import short_conv, short_conv_export, short_conv_step_

__all__ = ["short_conv", "short_conv_export", "short_conv_step_"]
