"""Operations on hidden states with bounded memory."""

from firedistill.ops.fire_head import FireHeadOutput, FirstPass, fire_head_loss, first_pass
from firedistill.ops.head import Head, check_head, chunked_token_loss

__all__ = ["FireHeadOutput", "FirstPass", "Head", "check_head", "chunked_token_loss", "fire_head_loss", "first_pass"]
