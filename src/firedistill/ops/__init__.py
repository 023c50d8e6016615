"""Operations on hidden states with bounded memory."""

from firedistill.ops.fire_head import FireHeadOutput, fire_head_loss
from firedistill.ops.head import Head, chunked_token_loss

__all__ = ["FireHeadOutput", "Head", "chunked_token_loss", "fire_head_loss"]
