"""Position encodings by their definitions: rotary frequencies and distance biases."""
