"""Run quantized GGUF models with speculative drafters, exactly and fast."""

__version__ = "0.1.0"
