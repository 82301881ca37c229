"""Parts of a layer that run a piece of the tokens at a time, forward and backward."""
