"""Any trainer's model on trees: the seam at the decoder's forward."""

from treewise.integrations.decoder.seam import DecoderSeam

__all__ = ["DecoderSeam"]
