"""What a model's KV cache is to the plugin: its tensors, its cache groups, what it refuses."""
