"""The one place that touches torchtitan's internals.

torchtitan 0.3.0 is used unmodified, hence: the CPU device (``device``), attention and token
dispatch that run on CPU and gloo (``attention``, ``dispatch``), what models need of its private
side (``moe``, ``decoder``, ``expert_load``), checkpoints and exports (``checkpoint``, ``export``),
the trainer subclass (``trainer``) and the translation of a recipe into ``Trainer.Config``
(``build``, ``plan``, ``batch``).
"""
