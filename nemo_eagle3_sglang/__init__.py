"""EAGLE-3 draft training in NeMo AutoModel with the frozen target running through SGLang."""

__version__ = "0.1.0"
