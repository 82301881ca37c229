"""AdamW whose fp32 state lives on the host: streamed through the device, or updated by the CPU."""
