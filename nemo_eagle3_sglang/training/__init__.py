"""The AutoModel recipe and what surrounds a run; only ``recipe.py`` imports nemo_automodel."""
