"""What can be said and made without a model's weights: presets, bytes, plans, and random checkpoints at any scale."""
