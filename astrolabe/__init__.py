"""Astrolabe: tool documentation and questions in, a trained tool agent out."""

__version__ = "0.1.0"
