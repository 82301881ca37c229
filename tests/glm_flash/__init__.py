"""The GLM-5.3-Flash model against transformers': builders and comparisons for tests."""
