"""The one place that touches torchtitan's internals.

Everything here exists because torchtitan 0.3.0 is used unmodified: the CPU device (``device``), the
attention and dispatch replacements that CPU and gloo need (``attention``, ``dispatch``), the trainer
subclass (``trainer``) and the translation of a recipe into ``Trainer.Config`` (``build``).
"""
