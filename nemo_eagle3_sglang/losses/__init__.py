"""Losses over a vocabulary of any size: a torch reference and a fused path, side by side."""
