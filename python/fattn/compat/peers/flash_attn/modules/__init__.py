"""flash_attn.modules: modules of attention."""
