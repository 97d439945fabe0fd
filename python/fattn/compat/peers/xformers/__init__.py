"""xFormers, computed by fattn (fattn.compat): xformers.ops.memory_efficient_attention and its biases."""

from fattn.compat._peers import version_of

__version__ = version_of("xformers")
