"""DeepSeek sparse attention over pooled keys in plain torch."""
