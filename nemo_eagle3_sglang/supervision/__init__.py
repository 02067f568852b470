"""From a target's hidden states to what the draft is trained on; the same for every engine."""
