"""flash_attn.utils: what attention modules take."""
