"""The one place that touches torchtitan's internals.

torchtitan 0.3.0 is used unmodified, hence: the CPU device (``device``), attention and token
dispatch that run on CPU and gloo (``attention``, ``dispatch``), the trainer subclass (``trainer``)
and the translation of a recipe into ``Trainer.Config`` (``build``).
"""
