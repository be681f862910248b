"""`ggufspec server`: a drop-in for llama-server on this engine."""
