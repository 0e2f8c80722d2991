from kimi_k3_kernels.kda.op import (
    kda_chunk,
    kda_chunk_export,
    kda_recurrent,
    kda_recurrent_export,
    kda_step_,
)

__all__ = ["kda_chunk", "kda_chunk_export", "kda_recurrent", "kda_recurrent_export", "kda_step_"]
