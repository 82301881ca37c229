"""GLM-5.3-Flash checkpoints in the published safetensors layouts: import, export, conversion."""
