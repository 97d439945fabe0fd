"""flash_attn 4 (flash_attn.cute), computed by fattn (fattn.compat)."""

from fattn.compat._peers import version_of

from .interface import flash_attn_combine, flash_attn_func, flash_attn_varlen_func, get_scheduler_metadata

__version__ = version_of("flash-attn-4")
__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func", "get_scheduler_metadata"]
