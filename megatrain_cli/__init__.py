"""megatrain trains every parameter of language models far larger than the GPU's memory."""

__version__ = "0.1.0"
