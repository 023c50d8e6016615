"""Operations on hidden states with bounded memory."""

from firedistill.ops.fused_head import Head, chunked_token_loss

__all__ = ["Head", "chunked_token_loss"]
